"""The GPU kernels against the definition in fp64: on a GPU, or in Triton's interpreter on a CPU."""

import math
import os
import subprocess
import sys

import pytest
import torch
from operands import Geometry

from diffattn.ops import (
    diff_attention,
    document_mask,
    documents_of_lengths,
    documents_of_positions,
    softmax_attention,
)
from diffattn.ops.gpu import normed_diff_attention, packed_diff_attention
from diffattn.ops.gpu.operators import gpu_backward, gpu_forward, gpu_inference

# tests/ops/conftest.py asks for deterministic algorithms, for which cuBLAS wants this
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "q", "k", "v", "q_noise", "k_noise", "lam", "sink", "sink_noise")
needs_triton = pytest.mark.triton


def moved(value, dtype):
    """On the device, floating numbers in this dtype and with gradients."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.to(DEVICE)
    return value.to(dtype).requires_grad_() if value.is_floating_point() else value


def results(run, geometry, dtype, *, lam="token", sinks=False, rounded=None):
    """Output and all gradients of `run(tensors, lam, sinks)`, in fp64 on the CPU."""
    drawn = [None if t is None else t.to(rounded or torch.float64) for t in geometry.draw()]
    tensors = [moved(t, dtype) for t in drawn]
    work = torch.promote_types(dtype, torch.float32)
    coefficient = moved(geometry.lam(lam), work)
    generator = torch.Generator().manual_seed(5)
    of_sinks = {}
    if sinks:
        for name, heads in (("sink", geometry.H), ("sink_noise", geometry.N)):
            of_sinks[name] = moved(torch.randn(heads, generator=generator), work)
    leaves = [t for t in (*tensors, coefficient, *of_sinks.values()) if torch.is_tensor(t)]
    out = run(tensors, coefficient, of_sinks)
    assert out.dtype == dtype
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    weight = weight.to(out)  # the same numbers in every dtype
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


def compare(geometry, *, run=None, lam="token", sinks=False, **options):
    """Assert that output and gradients agree with the definition; return the output."""

    def by(impl):
        def call(tensors, lam, sinks):
            moved_options = {
                name: value.to(DEVICE) if torch.is_tensor(value) else value
                for name, value in options.items()
            }
            return diff_attention(*tensors, lam=lam, impl=impl, **sinks, **moved_options)

        return call

    want = results(by("reference"), geometry, torch.float64, lam=lam, sinks=sinks)
    got = results(run or by("triton"), geometry, torch.float32, lam=lam, sinks=sinks)
    for number, (ours, exact) in enumerate(zip(got, want, strict=True)):
        size = max(1.0, exact.abs().max().item())
        assert ours.isfinite().all(), number
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5 * size)
    return got[0].detach()


GEOMETRIES = [
    (Geometry(B=2, H=4, N=4, G=2, T=40, S=40, D=16, E=32), {"causal": True}),
    (Geometry(H=6, N=2, G=1, T=33, S=70, D=16, E=16), {"causal": True}),
    (Geometry(H=4, N=2, G=2, T=70, S=33, E=16), {"causal": True}),
    (Geometry(H=4, N=4, G=1, T=20, S=37, own_key=False), {}),
    (Geometry(T=1, S=1), {"causal": True}),
    (Geometry(T=1, S=9), {"causal": True}),
    (Geometry(T=63, S=63, D=20, E=24), {"causal": True, "window": 9}),
    (Geometry(T=127, S=63), {"causal": True, "window": 20}),
    (Geometry(T=63, S=127, own_key=False, G=1), {"window": 9}),
    (Geometry(T=127, S=63), {"window": 40}),
    (Geometry(T=64, S=128, D=5, E=7), {"window": 1000}),
    (Geometry(T=65, S=65, D=33, E=65), {"causal": True, "scale": -0.3}),
]


@needs_triton
@pytest.mark.parametrize(
    ("geometry", "options"), GEOMETRIES, ids=[f"{g}-{'-'.join(o) or 'full'}" for g, o in GEOMETRIES]
)
def test_forward_and_gradients(geometry, options):
    compare(geometry, **options)


@needs_triton
@pytest.mark.parametrize("lam", ["number", "scalar", "head", "token"])
def test_gradient_of_every_shape_of_lam(lam):
    compare(Geometry(B=2, H=6, N=2, G=2), lam=lam, causal=True)


@needs_triton
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 3}], ids=["full", "window"])
def test_sinks_and_their_gradients(options):
    compare(Geometry(B=2, H=4, N=2, G=1, T=7, S=5), sinks=True, **options)


MASKED = Geometry(B=2, H=4, N=4, G=2, T=21, S=35)


def masks():
    """Masks of every kind that leave each row a key, by name."""
    B, H, T, S = MASKED.B, MASKED.H, MASKED.T, MASKED.S
    seen = MASKED.bool_mask((B, 1, T, S))
    seen[..., 0] = True
    padding = torch.ones(B, 1, 1, S, dtype=torch.bool)
    padding[-1, ..., 4:] = False
    by_head = MASKED.bool_mask((B, H, T, S))
    by_head[..., 0] = True
    bias = torch.randn(B, 1, T, S, generator=torch.Generator().manual_seed(3))
    return {
        "bool": seen,
        "bool-two-axes": seen[0, 0],
        "padding": padding,
        "lowest": torch.zeros(B, 1, T, S).masked_fill(~seen, torch.finfo().min),
        "bias-inf": bias.masked_fill(~seen, -math.inf),
        "row-bias": bias[..., :1],
        "by-head": by_head,
        "by-head-slopes": torch.arange(1, H + 1).view(1, H, 1, 1) * -0.2 * torch.arange(S).flip(0),
    }


@needs_triton
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 6}], ids=str)
@pytest.mark.parametrize("name", list(masks()))
def test_masks(name, options):
    compare(MASKED, mask=masks()[name], **options)


@needs_triton
def test_a_mask_without_a_head_axis_serves_shared_noise_heads():
    geometry = Geometry(B=2, H=6, N=2, G=2, T=5, S=8)
    mask = geometry.bool_mask((2, 1, 5, 8))
    mask[..., 0] = True
    compare(geometry, mask=mask, causal=True)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_row_that_sees_nothing_is_exactly_zero_with_finite_gradients(dtype, sinks):
    """By a mask (query 3), and by order: nine queries on four keys."""
    mask = torch.ones(9, 4, dtype=torch.bool)
    mask[7] = False

    def run(tensors, lam, sinks):
        out = diff_attention(
            *tensors, lam=lam, causal=True, mask=mask.to(DEVICE), impl="triton", **sinks
        )
        assert (out[:, :5] == 0).all()
        assert (out[:, 7] == 0).all()
        assert (out[:, [5, 6, 8]] != 0).any(-1).all()
        return out

    for value in results(run, Geometry(T=9, S=4), dtype, sinks=sinks):
        assert value.isfinite().all()


UNSEEN = [
    ({"causal": True, "window": 2}, (slice(None), 0)),
    ({"window": 1}, (slice(None), 1)),
    ({"mask": torch.tensor([True, True, True, False, True])}, (slice(None), 3)),
    (
        {"causal": True, "mask": torch.tensor([[1, 1, 1, 1, 1]] * 2 + [[1, 1, 1, 1, 0]]).bool()},
        (slice(None), 4),
    ),
]


@needs_triton
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "split"])
@pytest.mark.parametrize("case", range(len(UNSEEN)))
def test_keys_that_nobody_sees_may_hold_anything(case, gradients):
    options, where = UNSEEN[case]
    options = {n: v.to(DEVICE) if torch.is_tensor(v) else v for n, v in options.items()}
    clean = [t.to(DEVICE) for t in Geometry(B=2, T=3, S=5).draw(torch.float32)]
    dirty = [t.clone() for t in clean]
    for number in (1, 2, 4):
        dirty[number][where] = math.nan
    found = []
    for tensors in (clean, dirty):
        leaves = [t.requires_grad_(gradients) for t in tensors]
        out = diff_attention(*leaves, lam=0.4, impl="triton", **options)
        grads = torch.autograd.grad(out.sum(), leaves) if gradients else ()
        found.append([out, *grads])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@needs_triton
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "split"])
def test_nan_in_a_score_is_not_lost(gradients):
    tensors = [t.to(DEVICE) for t in Geometry(T=20, S=20).draw(torch.float32)]
    tensors[0][0, 3, 1, 0] = math.nan
    tensors[1].requires_grad_(gradients)
    out = diff_attention(*tensors, lam=0.3, causal=True, impl="triton")
    assert out[0, 3, 1].isnan().all()
    assert out[0, :3].isfinite().all()
    assert out[0, 4:].isfinite().all()


def packed(documents, **options):
    """A run of the operator of packed documents."""
    return lambda tensors, lam, sinks: packed_diff_attention(
        *tensors, lam=lam, documents=documents.to(DEVICE), **options
    )


@needs_triton
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"window": 5}], ids=str)
@pytest.mark.parametrize(
    "documents",
    [
        documents_of_lengths(torch.tensor([0, 3, 40, 41, 70])),
        documents_of_positions(
            torch.cat((torch.arange(50), torch.arange(20))).expand(2, 70).contiguous()
        ),
    ],
    ids=["cu_seqlens", "positions"],
)
def test_packed_documents_equal_the_mask(documents, options):
    options = {"causal": True, **options}
    geometry = Geometry(B=2, H=4, N=2, G=2, T=70, S=70)
    compare(geometry, run=packed(documents, **options), mask=document_mask(documents), **options)


def test_documents_that_do_not_fit_are_named():
    tensors = Geometry(T=5, S=5).draw(torch.float32)
    with pytest.raises(ValueError, match=r"^documents: expected \[1, 5\]"):
        packed_diff_attention(*tensors, lam=0.2, documents=torch.zeros(1, 4))


SPLIT = [
    (Geometry(B=2, H=4, N=4, G=2, T=1, S=300, D=16, E=32), {"causal": True}),
    (Geometry(H=6, N=2, G=1, T=3, S=517), {"causal": True}),
    (Geometry(H=2, N=2, G=2, T=2, S=400, own_key=False), {"causal": True, "window": 150}),
    (Geometry(H=2, N=2, G=1, T=4, S=290), {}),
    (Geometry(B=2, H=4, N=4, G=2, T=1, S=5), {"causal": True}),
]


@needs_triton
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padding"])
@pytest.mark.parametrize(("geometry", "options"), SPLIT, ids=[str(g) for g, _ in SPLIT])
def test_few_queries_behind_many_keys(geometry, options, masked, sinks):
    found = {}
    mask = torch.ones(geometry.B, 1, 1, geometry.S, dtype=torch.bool)
    mask[0, ..., : geometry.S // 2] = not masked
    for impl, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        tensors = [None if t is None else t.to(DEVICE, dtype) for t in geometry.draw()]
        extra = {}
        if sinks:
            extra = {"sink": torch.ones(geometry.H), "sink_noise": torch.zeros(geometry.N)}
        found[impl] = diff_attention(
            *tensors,
            lam=geometry.lam("token").to(DEVICE),
            mask=mask.to(DEVICE) if masked else None,
            impl=impl,
            **{name: value.to(DEVICE) for name, value in extra.items()},
            **options,
        ).double()
    torch.testing.assert_close(found["triton"], found["reference"], rtol=0, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("T", [2, 90], ids=["split", "blocks"])
def test_the_head_norm_in_the_kernel(T):
    tensors = [t.to(DEVICE) for t in Geometry(T=T, S=90, H=4, N=2).draw(torch.float32)]
    gain = torch.randn(6, device=DEVICE)
    got = normed_diff_attention(*tensors, lam=0.3, gain=gain, factor=0.8, causal=True)
    exact = [t.double() for t in tensors]
    plain = diff_attention(*exact, lam=0.3, causal=True, impl="reference")
    want = 0.8 * torch.nn.functional.rms_norm(plain, (6,), gain.double(), 1e-5)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    with pytest.raises(NotImplementedError, match="normed_diff_attention has no gradients"):
        normed_diff_attention(*tensors, lam=0.3, gain=gain.requires_grad_(), factor=0.8)
    with pytest.raises(ValueError, match=r"^gain: expected \[6\]"):
        normed_diff_attention(*tensors, lam=0.3, gain=gain[:3], factor=0.8)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("lam", [0.2, 0.8], ids=["lam0.2", "lam0.8"])
def test_low_precision_stays_within_the_error_budget(dtype, lam):
    """error(kernel) <= 2 error(eager at that dtype) + a rounding floor, forward and gradients."""
    geometry = Geometry(B=2, T=63, S=63, H=4, N=4, G=2, D=16, E=32)
    visible = torch.ones(63, 63, dtype=torch.bool, device=DEVICE).tril()

    def eager(tensors, *_):
        q, k, v, q_noise, k_noise = tensors
        k, v, k_noise = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v, k_noise))
        maps = []
        for query, key in ((q, k), (q_noise, k_noise)):
            scores = query.transpose(1, 2) @ key.transpose(2, 3) * geometry.D**-0.5
            maps.append(scores.masked_fill(~visible, -math.inf).softmax(dim=-1))
        return ((maps[0] - lam * maps[1]) @ v).transpose(1, 2)

    def by(impl):
        return lambda tensors, *_: diff_attention(*tensors, lam=lam, causal=True, impl=impl)

    runs = {"exact": by("reference"), "eager": eager, "ours": by("triton")}
    found = {
        name: results(
            run,
            geometry,
            torch.float64 if name == "exact" else dtype,
            lam="number",
            rounded=dtype,
        )
        for name, run in runs.items()
    }
    for name, exact, plain, ours in zip(NAMES, *found.values(), strict=False):
        floor = torch.finfo(dtype).eps * exact.abs().max()
        budget = 2 * (plain.double() - exact).abs().max() + floor
        assert (ours.double() - exact).abs().max() <= budget, name


@needs_triton
def test_a_repeated_run_gives_the_same_bits():
    def run():
        tensors = [t.to(DEVICE).requires_grad_() for t in MASKED.draw(torch.float32)]
        out = diff_attention(*tensors, lam=0.3, causal=True, impl="triton")
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@needs_triton
def test_strided_inputs_give_the_same_bits():
    tensors = [t.to(DEVICE) for t in MASKED.draw(torch.float32)]
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    wide = [t.mT.contiguous().mT for t in tensors]
    first, *others = (
        diff_attention(*t, lam=0.3, causal=True, impl="triton") for t in (tensors, strided, wide)
    )
    assert all(torch.equal(first, other) for other in others)


def operands(absent):
    """Arguments of `gpu_forward`, those of these numbers left out."""
    geometry = Geometry(B=2, T=20, S=20, H=4, N=2, G=2, D=16, E=16)
    tensors = [
        *geometry.draw(torch.float32),
        torch.rand(2, 4, 20),
        torch.zeros(2, 1, 1, 20).expand(2, 4, 20, 20),
        torch.randn(4),
        torch.randn(2),
        torch.zeros(2, 20, dtype=torch.int32),
        torch.full((2, 20), 20, dtype=torch.int32),
    ]
    tensors = [None if n in absent else t.to(DEVICE) for n, t in enumerate(tensors)]
    return tensors, (True, 7, 0.25)


@needs_triton
@pytest.mark.parametrize("absent", [(), (4,), (6, 7, 8), (4, 7, 8, 9, 10)], ids=str)
def test_operators_follow_the_rules_of_torch(absent):
    tensors, options = operands(absent)
    for n in (0, 1, 2, 3, 4, 5, 7, 8):
        if tensors[n] is not None:
            tensors[n].requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(gpu_forward, (*tensors, *options), test_utils=tests)
    found = [t.detach() for t in gpu_forward(*tensors, *options)]
    plain = [None if t is None else t.detach() for t in tensors]
    backward = (torch.randn_like(found[0]), *plain[:7], *plain[9:], *found, *options)
    without = ("test_schema", "test_faketensor")
    torch.library.opcheck(gpu_backward, backward, test_utils=without)
    normed = (*plain, torch.ones(16, device=DEVICE), *options, 1e-5, 0.8)
    torch.library.opcheck(gpu_inference, normed, test_utils=without)


@needs_triton
def test_compiled_code_holds_one_operator_and_equals_eager():
    leaves = [t.to(DEVICE).requires_grad_() for t in MASKED.draw(torch.float32)]

    def run(*tensors):
        return diff_attention(*tensors, lam=0.3, causal=True, impl="triton")

    calls = []

    def backend(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert torch.equal(compiled(*leaves), run(*leaves))
    assert sum("gpu_forward" in name for name in calls) == 1


def test_what_the_kernels_do_not_serve_is_refused():
    tensors = Geometry().draw(torch.float32)
    for options, reason in (
        ({"softcap": 2.0}, "has no softcap"),
        ({"dropout": 0.1}, "has no dropout"),
        ({"mask": torch.zeros(5, 5, requires_grad=True)}, "has no gradient of a mask"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            diff_attention(*tensors, lam=0.2, impl="triton", **options)
    with pytest.raises(NotImplementedError, match=r"computes in fp32, got torch\.float64"):
        diff_attention(*Geometry().draw(), lam=0.2, impl="triton")
    with pytest.raises(ValueError, match=r"^impl: expected .*got 'triton'"):
        softmax_attention(*tensors[:3], impl="triton")


ALONE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import torch
from diffattn.ops import diff_attention
q, k, v, q_noise, k_noise = torch.randn(5, 1, 3, 2, 16).unbind(0)
try:
    diff_attention(q, k, v, q_noise, k_noise, lam=0.3, impl="triton")
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("interpret", "sentence"),
    [
        ("0", "impl='triton' runs on GPUs, got tensors on cpu: ask for impl='fused' or 'sdpa'"),
        ("1", "impl='triton' needs the package `triton`: pip install 'diffattn[triton]'"),
    ],
)
def test_without_a_gpu_or_without_triton_the_name_is_refused(interpret, sentence):
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    run = [sys.executable, "-c", ALONE]
    said = subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout
    assert said.startswith(sentence)
