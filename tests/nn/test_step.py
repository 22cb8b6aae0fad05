"""A step of decoding in one call of the compiled kernel equals the layer's own operations."""

import pytest
import torch

from diffattn.nn import DiffAttention, SoftmaxAttention, attention
from diffattn.ops.fused import library

pytestmark = pytest.mark.skipif(
    library.compiler() is None, reason="impl='fused' needs a C++ compiler: g++, or CXX"
)
WIDTH = 64
SIZES = {"match_heads": 8, "match_key_value_heads": 4}
LAYERS = {
    "softmax": lambda **o: SoftmaxAttention(WIDTH, num_heads=8, num_key_value_heads=4, **o),
    "v1": lambda **o: DiffAttention.v1(WIDTH, layer_idx=2, **SIZES, **o),
    "v1, lam per head": lambda **o: DiffAttention.v1(
        WIDTH, layer_idx=2, lam_per="head", **SIZES, **o
    ),
    "v2": lambda **o: DiffAttention.v2(WIDTH, **SIZES, **o),
    "grouped": lambda **o: DiffAttention.grouped(
        WIDTH, ratio=2, layer_idx=2, num_diff_heads=4, num_key_value_heads=2, head_dim=16, **o
    ),
    "grouped latent": lambda **o: DiffAttention.grouped_latent(
        WIDTH, ratio=2, match_heads=8, match_key_value_heads=2, value_dim=24, **o
    ),
}


def drawn(name, **options):
    torch.manual_seed(0)
    layer = LAYERS[name](**options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if layer.sinks is not None:
            layer.sinks.normal_(std=5)
    return layer.eval()


def stacked(layer, length, keys, dtype=torch.float32):
    """Arguments of `attend_stacked`, keys and values as a cache holds them."""
    x, context = torch.randn(2, length, WIDTH, dtype=dtype), torch.randn(2, keys, WIDTH)
    context = context.to(dtype)
    key = layer.kernel_keys(layer.keys(context, None)).transpose(1, 2).contiguous()
    value = layer.kernel_values(layer.values(context)).transpose(1, 2).contiguous()
    return x, layer.queries(x, None), key.transpose(1, 2), value.transpose(1, 2)


def both(layer, args, mask, causal, monkeypatch):
    """By the step, and by the operator with the modules behind it."""
    given = {"causal": causal, "impl": "fused"}
    with torch.no_grad():
        taken = []
        step = attention.attention_step
        monkeypatch.setattr(
            attention, "attention_step", lambda *a, **o: taken.append(0) or step(*a, **o)
        )
        got = layer.attend_stacked(*args, mask, **given)
    assert taken
    return got, layer.attend_stacked(*args, mask, **given).detach()


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_step_equals_operator_and_modules(name, sink, masked, length, monkeypatch):
    layer = drawn(name, sink=sink)
    args = stacked(layer, length, 300)
    mask = torch.rand(2, 1, length, 300) < 0.5 if masked else None
    got, wanted = both(layer, args, mask, not masked, monkeypatch)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_dtypes(name, dtype, monkeypatch):
    layer = drawn(name).to(dtype)
    got, wanted = both(layer, stacked(layer, 2, 33, dtype), None, True, monkeypatch)
    close = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got, wanted, **close)


def test_hidden_slots_are_not_read():
    layer = drawn("v1")
    x, q, k, v = (tensor.detach() for tensor in stacked(layer, 1, 40))
    mask = torch.arange(40).expand(2, 1, 1, 40) < 7
    given = {"causal": False, "impl": "fused"}
    with torch.no_grad():
        wanted = layer.attend_stacked(x, q, k[:, :7], v[:, :7], None, **given)
        k[:, 7:] = v[:, 7:] = float("nan")
        got = layer.attend_stacked(x, q, k, v, mask, **given)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("module", ["lam", "subln"])
def test_hooks_are_called(module):
    """What watches or replaces a module is not passed by."""
    layer, seen = drawn("v1"), []
    args = stacked(layer, 1, 12)
    getattr(layer, module).register_forward_hook(lambda *call: seen.append(call))
    with torch.no_grad():
        layer.attend_stacked(*args, None, causal=False, impl="fused")
    assert len(seen) == 1


@pytest.mark.parametrize("reason", ["five queries", "gradients", "fp16"])
def test_other_calls_go_the_usual_way(reason, monkeypatch):
    layer = drawn("v1")
    args = stacked(layer, 5 if reason == "five queries" else 1, 12)
    if reason == "fp16":
        layer, args = layer.half(), tuple(tensor.half() for tensor in args)
    monkeypatch.setattr(attention, "attention_step", None)
    with torch.set_grad_enabled(reason == "gradients"):
        heads = layer.attend_stacked(*args, None, causal=True, impl="fused")
    assert heads.isfinite().all()
