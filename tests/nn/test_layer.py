"""The differential layer against the whole layer written in loops, and what it is made of."""

import math

import oracles
import pytest
import torch

from diffattn.nn import DiffAttention, SoftmaxAttention
from diffattn.ops import IMPLEMENTATIONS


def gains_drawn(layer):
    """A layer in fp64 whose head gains differ from each other."""
    with torch.no_grad():
        layer.subln.weight.copy_(torch.linspace(0.5, 1.5, layer.value_dim))
    return layer.double()


def loops(layer, x, *, lam=None, lambda_init=None, **options):
    """`oracles.v1_layer` with the weights of a layer."""
    vectors = [getattr(layer.lam, f"lambda_{name}").detach() for name in ("q1", "k1", "q2", "k2")]
    start = oracles.depth_constant(layer.layer_idx + 1) if lambda_init is None else lambda_init
    return oracles.v1_layer(
        x,
        wq=layer.q_proj.weight.detach(),
        wk=layer.k_proj.weight.detach(),
        wv=layer.v_proj.weight.detach(),
        wo=layer.o_proj.weight.detach(),
        lam=oracles.exponential(*vectors, start) if lam is None else lam,
        lambda_init=start,
        gain=layer.subln.weight.detach(),
        pairs=layer.sizes.num_diff_heads,
        groups=layer.sizes.num_key_value_heads,
        head_dim=layer.head_dim,
        **options,
    )


CASES = {
    "v1": {"match_heads": 4},
    "v1-bidirectional": {"match_heads": 4, "causal": False},
    "v1-grouped-keys": {"match_heads": 8, "match_key_value_heads": 4},
    "v1-one-key-group": {"match_heads": 8, "match_key_value_heads": 2},
    "v1-deep": {"match_heads": 4, "layer_idx": 11},
    "grouped-2": {"match_heads": 8, "ratio": 2},
    "grouped-4": {"match_heads": 8, "ratio": 4},
}


def build(case, hidden=16, **options):
    options = {"layer_idx": 2, **CASES[case], **options}
    preset = DiffAttention.grouped if "ratio" in options else DiffAttention.v1
    return gains_drawn(preset(hidden, **options))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", list(CASES))
def test_layer_equals_the_loops(case, impl):
    layer = build(case, impl=impl)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    # lam as the layer holds it: its start value is an fp32 number
    want = loops(
        layer,
        x,
        lam=layer.lam(x).item(),
        causal=CASES[case].get("causal", True),
        ratio=CASES[case].get("ratio", 1),
    )
    torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["v1", "v1-grouped-keys", "grouped-2"])
def test_lam_of_the_layer_equals_the_paper(case):
    """Eq. 2 in fp64, to the rounding of an fp32 start value."""
    layer = build(case, layer_idx=5)
    vectors = [getattr(layer.lam, f"lambda_{name}") for name in ("q1", "k1", "q2", "k2")]
    want = oracles.exponential(*(v.detach() for v in vectors), oracles.depth_constant(6))
    assert layer.lam(torch.empty(0)).item() == pytest.approx(want, abs=6e-8)


@pytest.mark.parametrize("case", ["v1", "v1-grouped-keys", "grouped-2"])
def test_layer_with_rotary_positions_equals_the_loops(case):
    """To fp32 accuracy, with the paper's own lam."""
    layer = build(case, rope_theta=10_000.0)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    want = loops(layer, x, theta=10_000.0, ratio=CASES[case].get("ratio", 1))
    torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-6)


def test_rotary_layer_in_fp64_keeps_fp64_precision():
    layer = build("v1", rope_theta=10_000.0)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    want = loops(layer, x, lam=layer.lam(x).item(), theta=10_000.0)
    torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-12)


def test_lambda_start_replaces_the_depth_schedule():
    layer = build("v1", lambda_start=0.8)
    assert layer.lam.start.item() == pytest.approx(0.8, abs=1e-7)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    want = loops(layer, x, lam=layer.lam(x).item(), lambda_init=0.8)
    torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-12)


def test_lambda_std_zero_gives_exactly_the_start_value():
    layer = DiffAttention.v1(64, match_heads=4, layer_idx=3, lambda_std=0.0)
    assert layer.lam(torch.empty(0)).item() == torch.tensor(oracles.depth_constant(4)).item()


def test_v2_layer_is_two_softmax_layers_on_the_same_keys():
    """Signal and noise queries of adjacent heads, lam = sigmoid(x W), no norm."""
    layer = DiffAttention.v2(16, match_heads=4, match_key_value_heads=2).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    heads = (x @ layer.q_proj.weight.T).unflatten(-1, (8, 4))
    keys = (x @ layer.k_proj.weight.T).unflatten(-1, (2, 4))
    values = (x @ layer.v_proj.weight.T).unflatten(-1, (2, 4))
    lam = 1 / (1 + (-(x @ layer.lam.lambda_proj.weight.T)).exp())
    assert lam.shape == (2, 6, 4)
    out = oracles.diff_attention(
        *(t.detach() for t in (heads[:, :, 0::2], keys, values, heads[:, :, 1::2])),
        lam=lam.detach(),
        causal=True,
    )
    want = out.flatten(2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-12)
    assert layer.subln is None


def test_v2_pairs_stay_inside_a_key_group():
    """4 outputs, 2 key groups, 8 query heads: (0,1) (2,3) read group 0, (4,5) (6,7) group 1."""
    layer = DiffAttention.v2(16, match_heads=4, match_key_value_heads=2).double()
    with torch.no_grad():
        layer.v_proj.weight.zero_()
        layer.v_proj.weight[4:, 0] = 1.0  # group 1 holds the first input, group 0 nothing
        layer.o_proj.weight.copy_(torch.eye(16))
    x = torch.ones(1, 3, 16, dtype=torch.float64)
    heads = layer(x)[0, 2].view(4, 4)
    assert (heads[:2] == 0).all()
    assert (heads[2:] != 0).all()


def test_matched_sizes_and_parameter_counts():
    """Acceptance case 8: width 256 against 8 heads of 32."""
    layer = DiffAttention.v1(256, match_heads=8, layer_idx=0)
    assert layer.sizes.num_diff_heads == 4
    assert (layer.head_dim, layer.value_dim) == (32, 64)
    assert layer.sizes.num_diff_heads * layer.value_dim == 256
    counts = {
        "projections": sum(
            getattr(layer, name).weight.numel() for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        ),
        "lambda": sum(p.numel() for p in layer.lam.parameters()),
        "gain": layer.subln.weight.numel(),
    }
    assert counts == {"projections": 262_144, "lambda": 128, "gain": 64}
    assert sum(p.numel() for p in layer.parameters()) == 262_144 + 128 + 64


def test_both_spellings_of_a_layer_have_the_same_shapes():
    matched = DiffAttention.v1(256, match_heads=8, match_key_value_heads=4, layer_idx=0)
    counted = DiffAttention.v1(256, num_diff_heads=4, num_key_value_heads=2, layer_idx=0)
    assert matched.sizes == counted.sizes
    for one, two in zip(matched.parameters(), counted.parameters(), strict=True):
        assert one.shape == two.shape


def test_asking_for_twice_the_pairs_warns_with_both_numbers():
    with pytest.warns(UserWarning, match="num_diff_heads=8 narrows") as caught:
        layer = DiffAttention.v1(256, match_heads=8, num_diff_heads=8, layer_idx=0)
    assert len(caught) == 1
    message = str(caught[0].message)
    for part in ("num_diff_heads=8", "head_dim to 16", "8 heads has 32", "num_diff_heads=4"):
        assert part in message
    assert layer.head_dim == 16


def variants():
    return {
        "v1": DiffAttention.v1(32, match_heads=4, layer_idx=0),
        "v1-gqa": DiffAttention.v1(32, match_heads=8, match_key_value_heads=4, layer_idx=0),
        "v2": DiffAttention.v2(32, match_heads=4),
        "grouped": DiffAttention.grouped(32, match_heads=8, ratio=2, layer_idx=0),
        "softmax": SoftmaxAttention(32, num_heads=4),
        "bias": DiffAttention.v1(32, match_heads=4, layer_idx=0, bias=True),
    }


@pytest.mark.parametrize("name", list(variants()))
def test_no_parameter_has_zero_dimensions(name):
    assert all(p.dim() > 0 and p.numel() > 0 for p in variants()[name].parameters())


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("v1", {"lam.lambda_q1", "lam.lambda_k1", "lam.lambda_q2", "lam.lambda_k2"}),
        ("grouped", {"lam.lambda_q1", "lam.lambda_k1", "lam.lambda_q2", "lam.lambda_k2"}),
        ("v2", {"lam.lambda_proj.weight"}),
        ("softmax", set()),
    ],
)
def test_parameter_names_are_those_of_checkpoints(name, own):
    projections = {f"{part}_proj.weight" for part in "qkvo"}
    norm = {"subln.weight"} if name in ("v1", "grouped") else set()
    layer = variants()[name]
    assert set(dict(layer.named_parameters())) == projections | own | norm
    assert set(layer.state_dict()) == projections | own | norm  # the start value is not stored


def test_lambda_vectors_start_from_a_normal_of_a_tenth():
    layer = DiffAttention.v1(4096, match_heads=2, layer_idx=0)
    drawn = torch.cat([p.detach() for p in layer.lam.parameters()])
    assert drawn.numel() == 4 * 2048
    assert abs(drawn.mean()) < 5 * 0.1 / math.sqrt(drawn.numel())
    assert drawn.std() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("name", list(variants()))
def test_every_parameter_gets_a_gradient(name):
    layer = variants()[name]
    layer(torch.randn(2, 5, 32)).square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        if parameter_name != "k_proj.bias":  # moves all scores of a query alike
            assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", ["v1", "v1-gqa", "v2", "grouped"])
def test_one_kernel_call_with_the_layers_own_steps_equals_its_forward(name):
    """`kernel_queries`, `kernel_keys` and `combine` around any stock attention."""
    layer = variants()[name].double()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    q = layer.kernel_queries(layer.queries(x, None)).transpose(1, 2)
    k = layer.kernel_keys(layer.keys(x, None)).transpose(1, 2)
    v = layer.kernel_values(layer.values(x)).transpose(1, 2)
    assert q.shape[1] // k.shape[1] == layer.num_key_value_groups
    k, v = (t.repeat_interleave(layer.num_key_value_groups, dim=1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) * layer.scaling).masked_fill(
        ~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf")
    )
    maps = scores.softmax(dim=-1)
    got = layer.output(x, layer.combine(x, (maps @ v).transpose(1, 2)))
    torch.testing.assert_close(got, layer(x), rtol=0, atol=1e-12)
    difference = layer.combine_maps(x, maps)
    lam = layer.lam(x)
    lam = lam.transpose(1, 2) if lam.dim() else lam
    torch.testing.assert_close(difference.sum(-1), (1 - lam).expand(difference.shape[:3]))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["v1", "v1-gqa", "v2", "grouped"])
def test_a_later_token_changes_nothing_earlier(name, impl):
    layer = variants()[name]
    layer.impl = impl
    x = torch.randn(2, 6, 32)
    changed = x.clone()
    changed[:, 4:] += 1.0
    torch.testing.assert_close(layer(changed)[:, :4], layer(x)[:, :4], rtol=0, atol=1e-6)
    assert not torch.allclose(layer(changed)[:, 4:], layer(x)[:, 4:])


def test_dropout_acts_in_training_alone():
    layer = DiffAttention.v1(32, match_heads=4, layer_idx=0, dropout=0.5)
    x = torch.randn(2, 6, 32)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_presets_are_the_class_with_its_sizes():
    """A preset is a choice of arguments; ratio 1 is V1."""
    layers = [
        DiffAttention.v1(32, match_heads=4, layer_idx=1),
        DiffAttention.grouped(32, match_heads=4, ratio=1, layer_idx=1),
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 4, 32)
    assert torch.equal(layers[0](x), layers[1](x))
    assert layers[0].sizes == layers[1].sizes


def test_an_unknown_kind_of_lam_is_named():
    sizes = DiffAttention.v1(32, match_heads=4, layer_idx=0).sizes
    with pytest.raises(ValueError, match=r"^lam: .*'sigmoid', got 'linear'"):
        DiffAttention(
            32, sizes=sizes, lam="linear", layer_idx=0, own_noise_key=True, head_norm=True
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"impl": "flash"}, ValueError, r"^impl: .* got 'flash'"),
        ({"impl": "sdpa", "dropout": 0.1}, NotImplementedError, "impl='sdpa' draws a dropout mask"),
        ({"impl": "one_call", "softcap": 5.0}, NotImplementedError, "takes no softcap"),
        ({"window": 0}, ValueError, "window: expected a whole number"),
        ({"dropout": 1.0}, ValueError, "dropout: expected a probability"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a number above 0"),
        ({"lam_per": "token"}, ValueError, "lam_per: expected 'layer', 'head' or 'group'"),
        ({"dropout_masks": "both"}, ValueError, "dropout_masks: expected 'shared'"),
    ],
)
def test_options_of_no_meaning_are_refused_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        DiffAttention.v1(32, match_heads=4, layer_idx=0, **options)
