"""Published attention layers against the same layers written from their equations."""

import published
import pytest
import torch

from diffattn.errors import UserError
from diffattn.models.convert import convert_layers
from diffattn.nn import DiffAttention, DiffSizes

HIDDEN, D, LAYER = 16, 4, 3
VECTORS = {f"lambda_{n}": (D,) for n in ("q1", "k1", "q2", "k2")}


def v1_shapes(pairs, groups):
    return {
        "q_proj.weight": (2 * pairs * D, HIDDEN),
        "k_proj.weight": (2 * groups * D, HIDDEN),
        "v_proj.weight": (2 * groups * D, HIDDEN),
        "out_proj.weight": (HIDDEN, 2 * pairs * D),
        "subln.weight": (2 * D,),
        **VECTORS,
    }


def v2_shapes(heads, groups):
    return {
        "q_proj.weight": (2 * heads * D, HIDDEN),
        "k_proj.weight": (groups * D, HIDDEN),
        "v_proj.weight": (groups * D, HIDDEN),
        "o_proj.weight": (HIDDEN, heads * D),
        "lambda_proj.weight": (heads, HIDDEN),
    }


TIMM = {
    "qkv.weight": (3 * HIDDEN, HIDDEN),
    "proj.weight": (HIDDEN, HIDDEN),
    "proj.bias": (HIDDEN,),
    "sub_norm.weight": (2 * D,),
    **VECTORS,
}
NORMS = {"q_norm.weight": (D,), "k_norm.weight": (D,)}


def phi_shapes(pairs, groups):
    rows = 2 * pairs * D + 4 * groups * D
    return {
        "Wqkv.weight": (rows, HIDDEN),
        "Wqkv.bias": (rows,),
        "out_proj.weight": (HIDDEN, 2 * pairs * D),
        "out_proj.bias": (HIDDEN,),
        "inner_cross_attn.subln.weight": (2 * D,),
        **{f"inner_cross_attn.{name}": shape for name, shape in VECTORS.items()},
    }


def without(shapes, *names):
    return {name: shape for name, shape in shapes.items() if name not in names}


CASES = {
    "unilm-v1": ("unilm-v1", published.unilm_v1, v1_shapes(4, 4)),
    "unilm-v1, grouped keys": ("unilm-v1", published.unilm_v1, v1_shapes(4, 2)),
    "unilm-v1, one key group": ("unilm-v1", published.unilm_v1, v1_shapes(3, 1)),
    "unilm-v1 without gain": (
        "unilm-v1",
        published.unilm_v1,
        without(v1_shapes(4, 2), "subln.weight"),
    ),
    "unilm-v2": ("unilm-v2", published.unilm_v2, v2_shapes(4, 4)),
    "unilm-v2, grouped keys": ("unilm-v2", published.unilm_v2, v2_shapes(4, 2)),
    "timm": ("timm", published.timm, TIMM),
    "timm with biases and norms": (
        "timm",
        published.timm,
        {**TIMM, **NORMS, "qkv.bias": (3 * HIDDEN,)},
    ),
    "timm, two numbers": (
        "timm",
        published.timm,
        {**without(TIMM, *VECTORS), "lambda_a": (), "lambda_b": ()},
    ),
    "phi4flash": ("phi4flash", published.phi4flash, phi_shapes(4, 2)),
}


def ours(state, layout):
    """The layer that a converted state dict belongs to."""
    joined = state["o_proj.weight"].shape[1]
    v2 = "lam.lambda_proj.weight" in state
    heads = state["lam.lambda_proj.weight"].shape[0] if v2 else joined // (2 * D)
    groups = state["k_proj.weight"].shape[0] // (D if v2 else 2 * D)
    layer = DiffAttention(
        HIDDEN,
        sizes=DiffSizes(
            num_diff_heads=heads,
            num_noise_heads=heads,
            num_key_value_heads=groups,
            head_dim=D,
            value_dim=D if v2 else 2 * D,
        ),
        lam="sigmoid" if v2 else "exponential",
        layer_idx=LAYER,
        own_noise_key=not v2,
        head_norm=not v2,
        bias="q_proj.bias" in state,
        output_bias="o_proj.bias" in state,
        qk_norm="q_norm.weight" in state,
        qk_norm_eps=1e-6,
        causal=layout != "timm",
        rope_theta=10_000.0 if layout.startswith("unilm") else None,
        impl="sdpa",  # the tensors are on trial, not a kernel
    )
    dtype = state["q_proj.weight"].dtype
    layer = layer.to(dtype)
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("case", list(CASES))
def test_the_converted_layer_is_the_same_function(case, dtype, close):
    layout, forward, shapes = CASES[case]
    theirs = published.drawn(shapes, dtype=dtype)
    layer = ours(convert_layers(theirs, layout, "diffattn"), layout)
    x = torch.randn(2, 6, HIDDEN, dtype=dtype)
    want = forward({name: t.double() for name, t in theirs.items()}, x.double(), LAYER)
    assert want.abs().max() > 0.1
    torch.testing.assert_close(layer(x).double(), want, rtol=0, atol=close)


@pytest.mark.parametrize("case", [c for c in CASES if "without" not in c and "numbers" not in c])
def test_there_and_back_is_bitwise_inside_a_larger_model(case):
    layout, _, shapes = CASES[case]
    state = {
        f"blocks.{n}.attn.{k}": t for n in (0, 11) for k, t in published.drawn(shapes, n).items()
    }
    state |= {"blocks.0.mlp.fc1.weight": torch.randn(3, 3), "head.bias": torch.randn(2)}
    there = convert_layers(state, layout, "diffattn")
    assert "blocks.11.attn.o_proj.weight" in there
    assert there["head.bias"] is state["head.bias"]
    back = convert_layers(there, "diffattn", layout)
    assert set(back) == set(state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


def test_a_gain_is_folded_where_the_target_is_built_without_one():
    theirs = published.drawn(v1_shapes(4, 2))
    there = convert_layers(theirs, "unilm-v1", "diffattn")
    folded = convert_layers(there, "diffattn", "unilm-v1", fold_gain=True)
    assert "subln.weight" not in folded
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(
        published.unilm_v1(folded, x, LAYER), published.unilm_v1(theirs, x, LAYER),
        rtol=0, atol=1e-10,
    )  # fmt: skip


def test_a_layer_that_reads_anothers_keys_has_queries_alone():
    source = published.drawn(phi_shapes(4, 2))
    cross = published.drawn(without(phi_shapes(4, 0)), seed=1)
    converted = convert_layers(cross, "phi4flash", "diffattn")
    assert "k_proj.weight" not in converted
    a = ours(convert_layers(source, "phi4flash", "diffattn"), "phi4flash")
    b = DiffAttention(
        HIDDEN, sizes=a.sizes, lam="exponential", layer_idx=LAYER, own_noise_key=True,
        head_norm=True, bias=True, query_only=True,
    ).double()  # fmt: skip
    b.load_state_dict(converted)
    x, y = torch.randn(2, 1, 6, HIDDEN, dtype=torch.float64)
    width = 4 * 2 * D
    projected = (x @ source["Wqkv.weight"].T + source["Wqkv.bias"])[..., width:]
    k, v = projected.chunk(2, -1)
    held = (k.unflatten(-1, (-1, D)), v.unflatten(-1, (-1, 2 * D)))
    want = published.phi4flash(cross, y, LAYER, held)
    torch.testing.assert_close(b(y, key_values=a.key_values(x)), want, rtol=0, atol=1e-10)
    back = convert_layers(converted, "diffattn", "phi4flash")
    assert all(torch.equal(back[name], tensor) for name, tensor in cross.items())


def changed(shapes, **changes):
    return published.drawn({**shapes, **{n.replace("__", "."): s for n, s in changes.items()}})


V1 = v1_shapes(4, 2)
REFUSED = {
    "V2 under V1's name": (v2_shapes(4, 2), "unilm-v1", "no attention layer of .* unilm-v1"),
    "V1 under V2's name": (V1, "unilm-v2", "no attention layer of the layout unilm-v2"),
    "a plain layer of the same width": (
        {**V1, "q_proj.weight": (16, HIDDEN)},
        "unilm-v1",
        "expected 8 query heads of 4 for 4 outputs of 8, got 16 rows",
    ),
    "values of half the width": (
        {**V1, "v_proj.weight": (8, HIDDEN)},
        "unilm-v1",
        "expected 2 value heads of 8 that divide 4 outputs, got 8 rows",
    ),
    "vectors of another width": (
        {**V1, "lambda_k2": (8,)},
        "unilm-v1",
        r"expected lambda_k2 of shape \(4\), got \(8,\)",
    ),
    "keys of another width": (
        {**V1, "k_proj.weight": (16, 8)},
        "unilm-v1",
        r"expected k_proj.weight of shape \(any, 16\), got \(16, 8\)",
    ),
    "a bias": ({**V1, "q_proj.bias": (32,)}, "unilm-v1", "unilm-v1 has no place for q_proj.bias"),
    "a vector missing": (without(V1, "lambda_q2"), "unilm-v1", "lacks lambda_q2"),
    "three key heads": (v2_shapes(4, 3), "unilm-v2", "expected key heads that divide 4"),
    "a norm of all heads": ({**TIMM, "norm.weight": (HIDDEN,)}, "timm", "scale_norm"),
    "half a pair": (
        {**phi_shapes(4, 2), "Wqkv.weight": (56, HIDDEN)},
        "phi4flash",
        "expected Wqkv.weight of 32 query rows and key and value pairs of 4, got 56 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_checkpoint_that_is_not_what_its_label_says(name):
    shapes, layout, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        convert_layers(published.drawn(shapes), layout, "diffattn")


HELD = {
    "V2": (
        lambda: DiffAttention.v2(16, match_heads=4),
        "unilm-v1",
        "lam here comes from each token",
    ),
    "V1": (
        lambda: DiffAttention.v1(16, match_heads=4, layer_idx=0),
        "unilm-v2",
        "lam here is a learned number",
    ),
    "a gate": (
        lambda: DiffAttention.v1(16, match_heads=4, layer_idx=0, output_gate=True),
        "timm",
        "timm has no output gate",
    ),
    "sinks": (
        lambda: DiffAttention.v1(16, match_heads=4, layer_idx=0, sink=True),
        "unilm-v1",
        "unilm-v1 has no attention sinks",
    ),
    "no norm": (
        lambda: DiffAttention.v1(16, match_heads=4, layer_idx=0, head_norm=False),
        "unilm-v1",
        "unilm-v1 norms each head",
    ),
    "lam per head": (
        lambda: DiffAttention.v1(16, match_heads=4, layer_idx=0, lam_per="head"),
        "phi4flash",
        "phi4flash has one lam a layer, and this layer 2",
    ),
    "grouped keys": (
        lambda: DiffAttention.v1(16, match_heads=4, match_key_value_heads=2, layer_idx=0),
        "timm",
        "timm has as many key heads as query heads",
    ),
    "shared noise": (
        lambda: DiffAttention.grouped(16, ratio=2, match_heads=4, layer_idx=0),
        "unilm-v1",
        "expected 4 query heads of 4 for 2 outputs of 8",
    ),
    "noise keys, V2": (
        lambda: DiffAttention(
            16,
            sizes=DiffAttention.v2(16, match_heads=4).sizes,
            lam="sigmoid",
            layer_idx=0,
            own_noise_key=True,
            head_norm=False,
        ),
        "unilm-v2",
        "unilm-v2 has one key and one value head of 4 for each of a divisor of 4 signal heads",
    ),
    "shared noise, V2": (
        lambda: DiffAttention.grouped_latent(16, ratio=2, match_heads=4, output_gate=False),
        "unilm-v2",
        "unilm-v2 has a noise head for each of 4 signal heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HELD))
def test_what_a_target_cannot_hold_is_refused(name):
    build, layout, message = HELD[name]
    with pytest.raises(UserError, match=message):
        convert_layers(build().state_dict(), "diffattn", layout)


def test_layouts_with_and_without_rotary_positions_do_not_meet():
    with pytest.raises(UserError, match="timm has none rotary positions, unilm-v1 interleaved"):
        convert_layers(published.drawn(TIMM), "timm", "unilm-v1")
