"""Every implementation against the reference: outputs and all gradients, masks, low precision."""

import pytest
import torch
from operands import Geometry

from diffattn.ops import IMPLEMENTATIONS, diff_attention, softmax_attention

FAST = [name for name in IMPLEMENTATIONS if name != "reference"]
ONE_PRODUCT = ("blocked", "fused")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
INPUTS = ("q", "k", "v", "q_noise", "k_noise")

GEOMETRIES = [
    (Geometry(B=2, H=4, N=4, G=2), {"causal": True}),
    (Geometry(H=6, N=2, G=1, T=3, S=7), {"causal": True}),
    (Geometry(H=4, N=2, G=2, T=7, S=3), {"causal": True}),
    (Geometry(H=4, N=4, G=1, own_key=False), {}),
    (Geometry(T=1, S=1), {"causal": True}),
    (Geometry(T=1, S=9), {"causal": True}),
    (Geometry(T=63, S=63, G=1, E=4), {"causal": True, "window": 9}),
    (Geometry(T=127, S=63), {"causal": True, "window": 20}),
    (Geometry(T=63, S=127), {"window": 9}),
    (Geometry(T=127, S=63), {"window": 9}),
    (Geometry(T=128, S=128, own_key=False, E=4), {"causal": True}),
    (Geometry(T=257, S=300, D=2, E=3), {"causal": True}),
    (Geometry(T=513, S=513, D=2, E=3), {"causal": True, "window": 100}),
    (Geometry(T=300, S=257, D=2, E=3), {"window": 100}),
]


def run_with_gradients(operator, tensors, extra, **options):
    """Output and the gradient of every tensor (and of `extra`) under a fixed weighting."""
    leaves = [t for t in (*tensors, *extra) if t is not None]
    out = operator(**options)
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * weight).sum(), leaves)


def compare(impl, geometry, dtype, *, lam="token", mask=None, tolerance=None, **options):
    """Assert that an implementation agrees with the reference; return its output."""
    results = []
    for name in ("reference", impl):
        tensors = geometry.draw(dtype, requires_grad=True)
        coefficient = geometry.lam(lam, torch.promote_types(dtype, torch.float32))
        extra = [coefficient.requires_grad_()] if lam != "number" else []
        results.append(
            run_with_gradients(
                lambda tensors=tensors, lam=coefficient, name=name: diff_attention(
                    *tensors, lam=lam, mask=mask, impl=name, **options
                ),
                tensors,
                extra,
            )
        )
    (want, want_grads), (got, got_grads) = results
    atol = TOLERANCE[dtype] if tolerance is None else tolerance
    assert got.dtype == dtype
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=0, atol=atol)
    assert len(got_grads) == len(want_grads)
    for name, got_grad, want_grad in zip((*INPUTS, "lam"), got_grads, want_grads, strict=False):
        size = max(1.0, want_grad.abs().max().item())
        assert got_grad.isfinite().all(), name
        torch.testing.assert_close(
            got_grad, want_grad, rtol=0, atol=atol * size, msg=lambda m, name=name: f"{name}: {m}"
        )
    return got


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    ("geometry", "options"), GEOMETRIES, ids=[f"{g}-{'-'.join(o) or 'full'}" for g, o in GEOMETRIES]
)
def test_forward_and_gradients(impl, dtype, geometry, options):
    compare(impl, geometry, dtype, **options)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("own_key", [True, False], ids=["v1", "v2"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (6, 3), (5, 5)], ids=str)
def test_one_map_of_pairs_to_key_groups(heads, groups, own_key, impl):
    """Odd counts and a single key group too; within 1e-11, gradients included."""
    geometry = Geometry(H=heads, N=heads, G=groups, E=8, own_key=own_key)
    compare(impl, geometry, torch.float64, causal=True)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("lam", ["number", "scalar", "head", "token"])
def test_gradient_of_every_shape_of_lam(impl, lam):
    compare(impl, Geometry(B=2, H=6, N=2, G=2), torch.float64, lam=lam, causal=True)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_lam_gradient_is_minus_noise_output_times_gradient(impl):
    """D lam = -sum(dO * A2 v), for a scalar."""
    q, k, v, q_noise, k_noise = Geometry(B=2).draw()
    lam = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    diff_attention(q, k, v, q_noise, k_noise, lam=lam, impl=impl).square().sum().backward()
    out = diff_attention(q, k, v, q_noise, k_noise, lam=lam.detach(), impl="reference")
    noise = softmax_attention(q_noise, k_noise, v, impl="reference")
    torch.testing.assert_close(lam.grad, -(2 * out * noise).sum(), rtol=1e-10, atol=0)


def masks_of(geometry):
    """Masks of every kind that leave each row a key, by name."""
    B, H, T, S = geometry.B, geometry.H, geometry.T, geometry.S
    seen = geometry.bool_mask((B, 1, T, S))
    seen[..., 0] = True
    padding = torch.ones(B, 1, 1, S, dtype=torch.bool)
    padding[-1, ..., S - 2 :] = False
    by_head = geometry.bool_mask((B, H, T, S))
    by_head[..., 0] = True
    bias = torch.randn(B, 1, T, S, generator=torch.Generator().manual_seed(3))
    slopes = torch.arange(1, H + 1).view(1, H, 1, 1) * -0.2 * torch.arange(S).flip(0)
    return {
        "bool": seen,
        "bool-two-axes": seen[0, 0],
        "bool-three-axes": seen[0],
        "padding": padding,
        "padding-one-axis": padding[-1, 0, 0],
        "float-inf": torch.zeros(B, 1, T, S).masked_fill(~seen, float("-inf")),
        "float-lowest": torch.zeros(B, 1, T, S).masked_fill(~seen, torch.finfo().min),
        "float-bias": bias,
        "float-bias-inf": bias.masked_fill(~seen, float("-inf")),
        "row-bias": bias[..., :1],
        "by-head-bool": by_head,
        "by-head-slopes": slopes,
        "by-head-one-row": by_head[:, :, :1],
    }


MASK_NAMES = list(masks_of(Geometry()))
MASKED = Geometry(B=2, H=4, N=4, G=2, T=5, S=8)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("name", MASK_NAMES)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": 3}],
    ids=["full", "causal", "window"],
)
def test_masks(impl, name, options):
    compare(impl, MASKED, torch.float64, mask=masks_of(MASKED)[name], **options)


@pytest.mark.parametrize("impl", FAST)
def test_masks_of_rows_beyond_one_block(impl):
    geometry = Geometry(T=300, S=520, D=2, E=3)
    for name in ("bool", "padding", "float-bias-inf", "by-head-bool"):
        compare(impl, geometry, torch.float64, mask=masks_of(geometry)[name], causal=True)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("name", ["bool", "padding", "float-bias-inf"])
def test_masks_without_a_head_axis_serve_shared_noise_heads(impl, name):
    geometry = Geometry(B=2, H=6, N=2, G=2, T=5, S=8)
    compare(impl, geometry, torch.float64, mask=masks_of(geometry)[name], causal=True)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_bool_and_float_masks_of_the_same_meaning_agree(impl):
    tensors = MASKED.draw()
    masks = masks_of(MASKED)
    results = [
        diff_attention(*tensors, lam=0.4, mask=masks[name], impl=impl)
        for name in ("bool", "float-inf", "float-lowest")
    ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-13)
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-13)


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name not in ONE_PRODUCT])
def test_a_learned_bias_gets_its_gradient(impl):
    tensors = MASKED.draw()
    bias = torch.randn(1, 1, 5, 8, dtype=torch.float64)

    def run(bias):
        return diff_attention(*tensors, lam=0.4, mask=bias, impl=impl)

    assert torch.autograd.gradcheck(run, bias.requires_grad_())


@pytest.mark.parametrize("impl", ONE_PRODUCT)
def test_one_product_for_both_maps_refuses_a_learned_bias(impl):
    bias = torch.zeros(1, 1, 5, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"impl='{impl}' has no gradient of a mask"):
        diff_attention(*MASKED.draw(), lam=0.4, mask=bias, impl=impl)


def empty_row_masks():
    """Masks of MASKED that hide every key of query 1 (and of query 3 in batch 1)."""
    seen = torch.ones(2, 1, 5, 8, dtype=torch.bool)
    seen[:, :, 1] = False
    seen[1, :, 3] = False
    zeros = torch.zeros(2, 1, 5, 8)
    return {
        "bool": seen,
        "float-inf": zeros.masked_fill(~seen, float("-inf")),
        "float-lowest": zeros.masked_fill(~seen, torch.finfo().min),
        "by-head": seen.expand(2, 4, 5, 8),
    }


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(empty_row_masks()))
def test_a_fully_masked_row_is_exactly_zero_with_finite_gradients(impl, dtype, name):
    tensors = MASKED.draw(dtype, requires_grad=True)
    lam = MASKED.lam("token", torch.float32).requires_grad_()
    out = diff_attention(*tensors, lam=lam, mask=empty_row_masks()[name], impl=impl)
    assert (out[:, 1] == 0).all()
    assert (out[1, 3] == 0).all()
    assert (out[0, 3] != 0).any()
    out[:, [0, 2]].square().sum().backward(retain_graph=True)  # a loss that ignores the row
    out.square().sum().backward()
    for tensor in (*tensors, lam):
        assert tensor.grad.isfinite().all()
    assert (tensors[0].grad[:, 1] == 0).all()


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=["causal", "window"])
def test_queries_before_the_first_key_are_exactly_zero(impl, options):
    """Nine queries on four keys, bottom right: the first five stand before every key."""
    tensors = Geometry(T=9, S=4).draw(torch.float32, requires_grad=True)
    out = diff_attention(*tensors, lam=0.4, causal=True, impl=impl, **options)
    assert (out[:, :5] == 0).all()
    assert (out[:, 5:] != 0).any(dim=-1).all()
    out.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in tensors)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_a_mask_that_hides_everything_gives_zeros(impl):
    tensors = MASKED.draw(torch.float32, requires_grad=True)
    hidden = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
    out = diff_attention(*tensors, lam=0.4, mask=hidden, impl=impl)
    assert (out == 0).all()
    out.sum().backward()
    assert all((tensor.grad == 0).all() for tensor in tensors)


@pytest.mark.parametrize(
    ("impl", "T"), [("reference", 5), ("reference", 64), *((name, 64) for name in FAST)]
)
def test_nan_of_a_query_is_not_silenced(impl, T):
    """Torch's CPU kernel itself loses a NaN where keys fill no vector register, so 64 for it."""
    q, k, v, q_noise, k_noise = Geometry(T=T, S=T).draw(torch.float32)
    q[0, 2, 0, 0] = float("nan")
    out = diff_attention(q, k, v, q_noise, k_noise, lam=0.4, causal=True, impl=impl)
    assert out[0, 2, 0].isnan().all()
    assert out[0, :2].isfinite().all()


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("size", [1e4, 1e6], ids=["scores-1e4", "scores-1e6"])
def test_large_scores_neither_overflow_nor_leak(impl, size):
    q, k, v, q_noise, k_noise = Geometry(T=7, S=7).draw(torch.float32)
    out = diff_attention(q * size, k, v, q_noise * size, k_noise, lam=0.4, causal=True, impl=impl)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, 0], 0.6 * v[:, 0], rtol=1e-5, atol=1e-6)


def eager_of_dtype(q, k, v, q_noise, k_noise, lam, visible):
    """The definition with every step rounded to the inputs' dtype: the budget's yardstick."""
    ratio = q.shape[2] // k.shape[2]
    k, v, k_noise = (t.repeat_interleave(ratio, dim=2).transpose(1, 2) for t in (k, v, k_noise))
    maps = []
    for query, key in ((q, k), (q_noise, k_noise)):
        scores = query.transpose(1, 2) @ key.transpose(2, 3) * q.shape[-1] ** -0.5
        maps.append(scores.masked_fill(~visible, float("-inf")).softmax(dim=-1))
    return ((maps[0] - lam * maps[1]) @ v).transpose(1, 2)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("T", [63, 128], ids=["T63", "T128"])
@pytest.mark.parametrize("lam", [0.2, 0.8], ids=["lam0.2", "lam0.8"])
def test_low_precision_stays_within_the_error_budget(impl, dtype, T, lam):
    """error(impl) <= 2 error(eager at that dtype) + a rounding floor, forward and gradients."""
    geometry = Geometry(B=2, T=T, S=T, H=4, N=4, G=2, D=16, E=32)
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    runs = {
        "exact": lambda *t: diff_attention(*t, lam=lam, causal=True, impl="reference"),
        "eager": lambda *t: eager_of_dtype(*t, lam, visible),
        "impl": lambda *t: diff_attention(*t, lam=lam, causal=True, impl=impl),
    }
    found = {}
    for name, run in runs.items():
        rounded = geometry.draw(dtype)
        leaves = [t.to(torch.float64 if name == "exact" else dtype) for t in rounded]
        leaves = [t.detach().requires_grad_() for t in leaves]
        out, grads = run_with_gradients(lambda run=run, leaves=leaves: run(*leaves), leaves, ())
        assert out.dtype == leaves[0].dtype
        found[name] = [t.double() for t in (out, *grads)]
    for name, exact, eager, got in zip(
        ("out", *INPUTS), found["exact"], found["eager"], found["impl"], strict=True
    ):
        floor = torch.finfo(dtype).eps * exact.abs().max()
        budget = 2 * (eager - exact).abs().max() + floor
        assert (got - exact).abs().max() <= budget, name


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_autocast_keeps_the_dtype_of_the_inputs(impl):
    tensors = Geometry(B=2).draw(torch.float32, requires_grad=True)
    lam = torch.tensor(0.4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = diff_attention(*tensors, lam=lam, causal=True, impl=impl)
    assert out.dtype == torch.float32
    out.square().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in (*tensors, lam))


@pytest.mark.parametrize("impl", ["auto", *IMPLEMENTATIONS])
def test_strided_inputs_give_the_same_numbers(impl):
    tensors = MASKED.draw()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    options = {"lam": MASKED.lam("token"), "causal": True, "impl": impl}
    torch.testing.assert_close(
        diff_attention(*strided, **options), diff_attention(*tensors, **options), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("name", [n for n in MASK_NAMES if n != "row-bias"])
def test_softmax_attention_under_masks(impl, name):
    q, k, v, *_ = MASKED.draw()
    mask = masks_of(MASKED)[name]
    got = softmax_attention(q, k, v, mask=mask, causal=True, impl=impl)
    want = diff_attention(q, k, v, q, None, lam=0.0, mask=mask, causal=True, impl="reference")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cuda_agrees_with_the_cpu_reference(impl, dtype):
    geometry = Geometry(B=2, T=130, S=300, H=4, N=4, G=2, D=64, E=128)
    tensors = geometry.draw(dtype)
    want = diff_attention(*(t.double() for t in tensors), lam=0.4, causal=True, impl="reference")
    got = diff_attention(*(t.cuda() for t in tensors), lam=0.4, causal=True, impl=impl)
    tolerance = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=tolerance)
