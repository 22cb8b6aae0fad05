"""Operator tests run on memory filled with NaN wherever torch would leave it uninitialised."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # makes `import operands` work


@pytest.fixture(autouse=True)
def _nan_filled_memory():
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
