#!/usr/bin/env bash
# The GPU kernels: correct first, then their speed; results in $OUT (results/gpu) as JSON.
# Takes under 8 minutes; PYTHON names an interpreter with torch and Triton.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" benchmarks/gpu.py \
  --out "${OUT:-results/gpu}" "$@"
