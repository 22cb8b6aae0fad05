"""Layers whose tensors arrive by other ways than construction."""

import pytest
import torch

from diffattn import DiffAttention


def layer():
    return DiffAttention.v1(32, match_heads=4, layer_idx=1)


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_built_on_no_device_gets_its_start_value_back(assign):
    torch.manual_seed(0)
    source, x = layer(), torch.randn(1, 5, 32)
    with torch.device("meta"):
        target = layer()
    if not assign:
        target = target.to_empty(device="cpu")
    target.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("preset", ["v1", "v2"])
def test_vectors_assigned_in_bf16_are_kept_in_fp32(preset):
    target = getattr(DiffAttention, preset)(32, match_heads=4, layer_idx=1)
    state = {name: tensor.bfloat16() for name, tensor in target.state_dict().items()}
    target.load_state_dict(state, assign=True)
    assert target.q_proj.weight.dtype == torch.bfloat16
    assert {vector.dtype for vector in target.lam.parameters()} == {torch.float32}


def test_the_default_implementation_compiles_whole():
    torch._dynamo.reset()
    compiled = torch.compile(layer(), fullgraph=True, backend="eager")
    assert compiled(torch.randn(1, 5, 32)).shape == (1, 5, 32)
