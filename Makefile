# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= diffattn-compare

.PHONY: demo test laws triton lint types format clean

# installed once, and again when the pins or the metadata change
$(VENV)/.installed: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "diffattn needs Python 3.11 or newer, got " + sys.version.split()[0] + "; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,export,dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/diffattn compare --preset quick --out $(OUT) --resume

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2

# the laws of the operator on 2,000 drawn cases each
laws: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -m laws --hypothesis-profile=many

# the GPU kernels: on a GPU, else in Triton's interpreter
triton: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[triton]'
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || export TRITON_INTERPRET=1; \
	$(BIN)/python -m pytest -n 2 tests/ops/test_triton.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OUT)
