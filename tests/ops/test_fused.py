"""What is special to the compiled kernel: its operators, threads, memory, and how it is built."""

import subprocess
import sys

import pytest
import torch
from operands import Geometry

from diffattn.ops import diff_attention, softmax_attention
from diffattn.ops.fused import library
from diffattn.ops.fused.operators import fused_backward, fused_forward

pytestmark = pytest.mark.skipif(
    library.compiler() is None, reason="impl='fused' needs a C++ compiler: g++, or CXX"
)
WIDE = Geometry(B=2, T=20, S=20, H=4, N=2, G=2, D=16, E=16)


def operands(dtype=torch.float32):
    """Arguments of `fused_forward`: tensors, then causal, window, scale."""
    q, k, v, q_noise, k_noise = WIDE.draw(dtype)
    lam = torch.rand(2, 20, 4, dtype=dtype)
    mask = torch.zeros(2, 1, 1, 20, dtype=dtype).expand(2, 4, 20, 20)
    sink, sink_noise = torch.randn(4, dtype=dtype), torch.randn(2, dtype=dtype)
    return [q, k, v, q_noise, k_noise, lam, mask, sink, sink_noise, True, 7, 0.25]


@pytest.mark.parametrize("absent", [(), (4,), (6, 7, 8), (3, 4, 5, 8)], ids=str)
def test_operators_follow_the_rules_of_torch(absent):
    args = [None if n in absent else arg for n, arg in enumerate(operands())]
    for n in (0, 1, 2, 3, 4, 5, 7, 8):
        if args[n] is not None:
            args[n].requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fused_forward, args, test_utils=tests)
    out, lse, lse_noise = (t.detach() for t in fused_forward(*args))
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    backward = [torch.randn_like(out), *plain[:9], lse, lse_noise, *plain[9:]]
    torch.library.opcheck(fused_backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_compiled_code_holds_one_operator_and_equals_eager():
    q, k, v, q_noise, k_noise = WIDE.draw(torch.float32)

    def run(q, k, v, q_noise, k_noise):
        return diff_attention(q, k, v, q_noise, k_noise, lam=0.3, causal=True, impl="fused")

    calls = []

    def backend(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert torch.equal(compiled(q, k, v, q_noise, k_noise), run(q, k, v, q_noise, k_noise))
    assert sum("fused_forward" in name for name in calls) == 1


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(threads):
    tensors = Geometry(B=2, T=200, S=200, H=4, N=4, G=2, D=16, E=32).draw(torch.float32)

    def run():
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = diff_attention(*leaves, lam=0.3, causal=True, impl="fused")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    alone = run()
    torch.set_num_threads(threads)
    try:
        together = run()
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


TILES = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 300},
    "both sides of a window": {"window": 40},
    "padding": {"causal": True, "mask": "padding"},
    "holes": {"mask": "holes"},
    "sinks": {"causal": True, "sinks": True},
}


@pytest.mark.parametrize("length", [1, 3, 130])
@pytest.mark.parametrize("case", TILES)
def test_keys_of_several_tiles(case, length):
    """More keys than the kernel works on at a time, with scores that grow from tile to tile."""
    options = dict(TILES[case])
    size = Geometry(B=2, T=length, S=600, H=4, N=2, G=2, D=16, E=24)
    tensors = [t.requires_grad_() for t in size.draw(torch.float64)]
    with torch.no_grad():
        tensors[1] *= torch.linspace(0, 20, 600, dtype=torch.float64)[:, None, None]
    if options.pop("sinks", False):
        options |= {"sink": torch.randn(4).double(), "sink_noise": torch.randn(2).double()}
    if options.get("mask") == "padding":
        options["mask"] = (torch.arange(600) >= torch.tensor([[0], [290]]))[:, None, None]
    if options.get("mask") == "holes":
        options["mask"] = torch.rand(2, 1, length, 600) < 0.4
        options["mask"][..., 256:512] = False  # a tile that nobody sees

    def run(impl):
        out = diff_attention(*tensors, lam=0.3, impl=impl, **options)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    torch.testing.assert_close(run("fused"), run("reference"), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", [1, 4, 5])
def test_keys_that_nobody_sees_may_hold_nan(length):
    """Few queries read the cache as it lies; the mask hides slots of it that hold anything."""
    size = Geometry(B=2, T=length, S=700, H=4, N=4, G=2, D=16, E=16)
    q, k, v, q_noise, k_noise = size.draw(torch.float32)
    seen = torch.zeros(2, 1, length, 700, dtype=torch.bool)
    seen[0, ..., 3:261], seen[1, ..., 300:310], seen[1, ..., 640] = True, True, True
    want = diff_attention(q, k, v, q_noise, k_noise, lam=0.3, mask=seen, impl="reference")
    for tensor in (k, v, k_noise):
        tensor[~seen[:, 0].any(1)] = float("nan")
    got = diff_attention(q, k, v, q_noise, k_noise, lam=0.3, mask=seen, impl="fused")
    torch.testing.assert_close(got, want)


MEMORY = """
import resource, sys, torch
from diffattn.ops import diff_attention
length = int(sys.argv[1])
torch.set_num_threads(1)
q, k, q_noise, k_noise = torch.randn(4, 1, length, 1, 16, requires_grad=True).unbind(0)
v = torch.randn(1, length, 1, 32, requires_grad=True)
out = diff_attention(q, k, v, q_noise, k_noise, lam=0.3, causal=True, impl="fused")
out.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_is_linear_in_length():
    def peak(length):
        run = [sys.executable, "-c", MEMORY, str(length)]
        return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    grown = peak(16_384) - peak(2_048)
    assert grown < 150_000  # kB; one map of 16,384 x 16,384 takes a million


def test_softmax_attention_runs_the_same_kernel():
    q, k, v, *_ = WIDE.draw(torch.float32)
    got = softmax_attention(q, k, v, causal=True, impl="fused")
    torch.testing.assert_close(got, softmax_attention(q, k, v, causal=True, impl="reference"))


def test_widths_that_are_no_multiples_are_filled_up():
    tensors = Geometry(B=1, T=9, S=9, H=2, N=2, G=1, D=5, E=7).draw(torch.float32)
    out = diff_attention(*tensors, lam=0.3, impl="fused")
    assert out.shape == (1, 9, 2, 7)
    torch.testing.assert_close(out, diff_attention(*tensors, lam=0.3, impl="reference"))


def test_nan_in_a_score_is_not_lost():
    q, k, v, q_noise, k_noise = WIDE.draw(torch.float32)
    q[0, 3, 1] = float("nan")
    out = diff_attention(q, k, v, q_noise, k_noise, lam=0.3, causal=True, impl="fused")
    assert out[0, 3, 1].isnan().all()
    rest = torch.ones(2, 20, 4, dtype=torch.bool)
    rest[0, 3, 1] = False
    assert out[rest].isfinite().all()


WITHOUT = """
import torch
from diffattn.ops import diff_attention
q, k, v, q_noise, k_noise = torch.randn(5, 1, 3, 2, 16).unbind(0)
try:
    diff_attention(q, k, v, q_noise, k_noise, lam=0.3, impl="fused")
except NotImplementedError as error:
    print(error)
"""


def test_without_a_compiler_the_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    run = [sys.executable, "-c", WITHOUT]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "found no compiler: install g++" in said


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    run = [sys.executable, "-c", WITHOUT]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "failed: no message" in said
    assert list((tmp_path / "diffattn" / "kernels").iterdir()) == []
