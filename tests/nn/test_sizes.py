"""Head counts and widths that follow from the Transformer to be matched."""

import pytest
import torch

from diffattn.nn import DiffAttention, DiffSizes, SoftmaxAttention, match_v1, match_v2


def sizes(H, N, G, D, E):
    return DiffSizes(
        num_diff_heads=H, num_noise_heads=N, num_key_value_heads=G, head_dim=D, value_dim=E
    )


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"match_heads": 8}, (4, 4, 4, 32, 64)),
        ({"match_heads": 8, "match_key_value_heads": 4}, (4, 4, 2, 32, 64)),
        ({"match_heads": 8, "match_key_value_heads": 2}, (4, 4, 1, 32, 64)),
        ({"match_heads": 8, "ratio": 2}, (4, 2, 2, 32, 64)),
        ({"match_heads": 8, "ratio": 4}, (4, 1, 1, 32, 64)),
        ({"match_heads": 8, "match_key_value_heads": 2, "ratio": 2}, (4, 2, 1, 32, 64)),
        ({"num_diff_heads": 2}, (2, 2, 2, 64, 128)),
        ({"num_diff_heads": 4, "num_key_value_heads": 1}, (4, 4, 1, 32, 64)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_match_v1(options, want):
    assert match_v1(256, **options) == sizes(*want)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"match_heads": 8}, (8, 8, 8, 32, 32)),
        ({"match_heads": 8, "match_key_value_heads": 2}, (8, 8, 2, 32, 32)),
        ({"match_heads": 8, "head_dim": 64}, (8, 8, 8, 64, 64)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_match_v2(options, want):
    assert match_v2(256, **options) == sizes(*want)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ["match_heads", "num_diff_heads"]),
        ({"match_heads": 7}, ["match_heads", "7", "256"]),
        ({"match_heads": 0}, ["match_heads", "0", "256"]),
        ({"match_heads": 1}, ["match_heads", "even", "1"]),
        ({"num_diff_heads": 3}, ["num_diff_heads", "256"]),
        ({"num_diff_heads": 0}, ["num_diff_heads", "0", "256"]),
        ({"match_heads": 8, "match_key_value_heads": 3}, ["match_key_value_heads", "even", "3"]),
        ({"match_heads": 8, "match_key_value_heads": 6}, ["match_key_value_heads", "3", "4"]),
        ({"num_diff_heads": 4, "num_key_value_heads": 0}, ["num_key_value_heads", "0"]),
        ({"match_heads": 8, "ratio": 3}, ["ratio", "3", "4"]),
        ({"match_heads": 8, "ratio": 0}, ["ratio", "0", "4"]),
        (
            {"match_heads": 8, "match_key_value_heads": 8, "ratio": 2},
            ["match_key_value_heads", "8", "4", "2"],
        ),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items()) or "nothing"
        if isinstance(value, dict)
        else ""
    ),
)
def test_match_v1_names_what_does_not_divide(options, parts):
    with pytest.raises(ValueError) as caught:
        match_v1(256, **options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"match_heads": 7}, ["match_heads", "7", "256"]),
        ({"match_heads": 8, "match_key_value_heads": 3}, ["match_key_value_heads", "3", "8"]),
        ({"match_heads": 8, "match_key_value_heads": 0}, ["match_key_value_heads", "0"]),
        ({"match_heads": 8, "head_dim": 0}, ["head_dim", "0"]),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_match_v2_names_what_does_not_divide(options, parts):
    with pytest.raises(ValueError) as caught:
        match_v2(256, **options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_heads": 7}, ["num_heads", "7", "256"]),
        ({"num_heads": 8, "num_key_value_heads": 3}, ["num_key_value_heads", "3", "8"]),
        ({"num_heads": 8, "num_key_value_heads": 0}, ["num_key_value_heads", "0", "8"]),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_softmax_layer_names_what_does_not_divide(options, parts):
    with pytest.raises(ValueError) as caught:
        SoftmaxAttention(256, **options)
    for part in parts:
        assert part in str(caught.value)


def test_a_pair_across_key_groups_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"4 key/value heads do not divide 2 noise heads"):
        sizes(4, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("heads", "groups"), [(6, 3), (4, 1), (5, 5)], ids=["6-kv3", "4-kv1", "5-kv5"]
)
@torch.no_grad()
def test_awkward_counts_of_key_heads_give_one_result(heads, groups):
    layer = DiffAttention.v1(
        heads * 16, num_diff_heads=heads, num_key_value_heads=groups, layer_idx=0
    )
    assert layer.sizes == sizes(heads, heads, groups, 8, 16)
    x, outputs = torch.randn(2, 5, heads * 16), []
    for layer.impl in ("reference", "sdpa", "one_call", "blocked", "auto"):
        outputs.append(layer(x))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-6)


def test_matching_without_narrowing_does_not_warn(recwarn):
    match_v1(256, match_heads=8)
    match_v1(256, match_heads=8, num_diff_heads=4)
    match_v1(256, num_diff_heads=8)
    assert not recwarn.list
