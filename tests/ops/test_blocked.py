"""What is special to attention in blocks: its operators, how a call is cut, memory."""

import subprocess
import sys

import pytest
import torch
from operands import Geometry

from diffattn.ops import blocked, diff_attention, softmax_attention
from diffattn.ops.blocked import blocked_backward, blocked_forward

WIDE = Geometry(B=2, T=20, S=24, H=4, N=2, G=2)


def operands(dtype=torch.float32):
    """Arguments of `blocked_forward`: tensors, then causal, window, scale."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 2, 20, 4), (2, 2, 24, 4), (2, 2, 24, 6), (1, 2, 2, 20, 4), (2, 2, 24, 4),
              (2, 2, 2, 20, 1), (2, 2, 20, 24), (2, 2, 2, 1, 1), (1, 2, 2, 1, 1))  # fmt: skip
    return [*(torch.randn(s, generator=generator, dtype=dtype) for s in shapes), True, 7, 0.25]


@pytest.mark.parametrize("absent", [(), (4,), (6, 7, 8), (3, 4, 5, 8)], ids=str)
def test_operators_follow_the_rules_of_torch(absent):
    args = [None if n in absent else arg for n, arg in enumerate(operands())]
    for n in (0, 1, 2, 3, 4, 5, 7, 8):
        if args[n] is not None:
            args[n].requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(blocked_forward, args, test_utils=tests)
    out = blocked_forward(*args).detach()
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    backward = [torch.randn_like(out), *plain]
    torch.library.opcheck(blocked_backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_compiled_code_holds_one_operator_and_equals_eager():
    tensors = WIDE.draw(torch.float32)

    def run(q, k, v, q_noise, k_noise):
        return diff_attention(q, k, v, q_noise, k_noise, lam=0.3, causal=True, impl="blocked")

    calls = []

    def backend(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert torch.equal(compiled(*tensors), run(*tensors))
    assert sum("blocked_forward" in name for name in calls) == 1


def outcome(impl, geometry, mask, **options):
    """Output and all gradients of differential attention with sinks."""
    tensors = [t for t in geometry.draw(requires_grad=True) if t is not None]
    generator = torch.Generator().manual_seed(5)
    sinks = torch.randn(geometry.H + geometry.N, generator=generator, dtype=torch.float64)
    sink, sink_noise = (s.clone().requires_grad_() for s in sinks.split([geometry.H, geometry.N]))
    lam = geometry.lam("token").requires_grad_()
    out = diff_attention(
        *tensors, lam=lam, mask=mask, sink=sink, sink_noise=sink_noise, impl=impl, **options
    )
    grads = torch.autograd.grad(out.square().sum(), [*tensors, lam, sink, sink_noise])
    return [out.detach(), *grads]


# bytes of a map: two heads alone, some heads of one batch entry, all heads of all entries
@pytest.mark.parametrize("size", [1, 40_000, 1 << 20])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "window": 50}, {"window": 9}]
)
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(B=3, T=70, S=81, H=4, N=4, G=4),
        Geometry(B=3, T=70, S=81, H=8, N=4, G=1),
        Geometry(B=3, T=81, S=70, H=8, N=8, G=2, own_key=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", ["no", "padding", "by-head"])
def test_every_way_to_cut_a_call_is_the_definition(size, options, geometry, masked, monkeypatch):
    if masked == "by-head" and geometry.N != geometry.H:
        pytest.skip("heads that share noise take no mask of their own")
    shape = {"no": None, "padding": (3, 1, 1, geometry.S), "by-head": None}[masked]
    mask = None if masked == "no" else geometry.bool_mask(shape)
    monkeypatch.setattr(blocked, "_BYTES", size)
    found = outcome("blocked", geometry, mask, **options)
    for got, want in zip(found, outcome("reference", geometry, mask, **options), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_call_is_cut_by_the_bytes_of_a_map():
    def plan(batch, heads, groups, length):
        q = torch.empty(1, batch, heads, length, 8, device="meta")
        found = blocked._Plan(q, torch.empty(batch, groups, length, 8, device="meta"), True, None)
        assert 4 * found.count * found.height * length <= max(2 * blocked._BYTES, 256 * length)
        return found.entries, found.count, found.height

    assert plan(8, 4, 4, 512) == (1, 32, 64)
    assert plan(2, 8, 8, 2048) == (2, 8, 128)
    assert plan(2, 8, 2, 2048)[:2] == (2, 4)
    assert plan(1, 8, 8, 8192) == (1, 2, 256)
    assert plan(1, 2, 1, 131_072) == (1, 2, 32)
    assert plan(2, 8, 8, 1) == (1, 16, 1)


MEMORY = """
import resource, sys, torch
from diffattn.ops import diff_attention
length = int(sys.argv[1])
torch.set_num_threads(1)
q, k, q_noise, k_noise = torch.randn(4, 1, length, 1, 16, requires_grad=True).unbind(0)
v = torch.randn(1, length, 1, 32, requires_grad=True)
out = diff_attention(q, k, v, q_noise, k_noise, lam=0.3, causal=True, impl="blocked")
out.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_is_linear_in_length():
    def peak(length):
        run = [sys.executable, "-c", MEMORY, str(length)]
        return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    grown = peak(16_384) - peak(2_048)
    assert grown < 150_000  # kB; one map of 16,384 x 16,384 takes a million


def test_softmax_attention_is_cut_alike():
    q, k, v, *_ = WIDE.draw(torch.float32)
    got = softmax_attention(q, k, v, causal=True, impl="blocked")
    torch.testing.assert_close(got, softmax_attention(q, k, v, causal=True, impl="reference"))
