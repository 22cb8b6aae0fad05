"""The table of what works with what is what happens."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the table covers the models, which need the extra hf")

import language_models
import layers
import table

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
ON_THE_FLY = [name for name in language_models.IMPLEMENTATIONS if name == "flex_attention"]
READY = [name for name in language_models.IMPLEMENTATIONS if name not in ON_THE_FLY]


@pytest.mark.parametrize("variant", list(layers.VARIANTS))
def test_layers(variant):
    _compare(table.layer_cells(variant))


@pytest.mark.parametrize("name", list(language_models.MODELS))
def test_language_models(name):
    _compare(table.model_cells(name, READY))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(language_models.MODELS))
def test_language_models_behind_kernels_compiled_on_the_fly(name):
    _compare(table.model_cells(name, ON_THE_FLY))


def test_write_the_page(request):
    if not request.config.getoption("--write-support"):
        pytest.skip("writes docs/support.md anew; run with --write-support")
    cells = {}
    for variant in layers.VARIANTS:
        cells |= table.layer_cells(variant)
    for name in language_models.MODELS:
        cells |= table.model_cells(name, language_models.IMPLEMENTATIONS)
    PAGE.write_text(table.page(cells))


def _compare(found):
    written = table.outcomes_of(PAGE.read_text())
    for (*place, impl), outcome in found.items():
        for_all = written.get((*place, None))
        assert outcome == "-" or outcome == (for_all or written[*place, impl]), (
            f"{place[1:]}, {impl}: {outcome}; run pytest tests/support --write-support"
        )
