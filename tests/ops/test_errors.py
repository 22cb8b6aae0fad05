"""Bad arguments: each is a ValueError that names the argument, what was expected, what came."""

import inspect

import pytest
import torch

from diffattn.ops import (
    apply_rotary,
    diff_attention,
    diff_attention_maps,
    rotary_angles,
    softmax_attention,
)
from diffattn.ops.layout import half_split_to_adjacent, half_to_interleaved, interleaved_to_half


def tensors(**changes):
    """Good operands (B 2, T 5, S 7, H 6, N 6, G 3, D 4, E 8) with some replaced."""
    good = {
        "q": torch.zeros(2, 5, 6, 4),
        "k": torch.zeros(2, 7, 3, 4),
        "v": torch.zeros(2, 7, 3, 8),
        "q_noise": torch.zeros(2, 5, 6, 4),
        "k_noise": torch.zeros(2, 7, 3, 4),
        "lam": 0.2,
    }
    return {**good, **changes}


CASES = {
    "q-three-axes": ({"q": torch.zeros(5, 6, 4)}, "q", ["4 axes", "(5, 6, 4)"]),
    "k-five-axes": ({"k": torch.zeros(1, 2, 7, 3, 4)}, "k", ["4 axes", "(1, 2, 7, 3, 4)"]),
    "v-two-axes": ({"v": torch.zeros(7, 3)}, "v", ["4 axes", "(7, 3)"]),
    "q-noise-three-axes": ({"q_noise": torch.zeros(5, 6, 4)}, "q_noise", ["(5, 6, 4)"]),
    "k-width": ({"k": torch.zeros(2, 7, 3, 5)}, "k", ["4)", "(2, 7, 3, 5)"]),
    "k-batch": ({"k": torch.zeros(3, 7, 3, 4)}, "k", ["(2, S", "(3, 7, 3, 4)"]),
    "v-time": ({"v": torch.zeros(2, 6, 3, 8)}, "v", ["(2, 7, 3)", "(2, 6, 3, 8)"]),
    "v-heads": ({"v": torch.zeros(2, 7, 6, 8)}, "v", ["(2, 7, 3)", "(2, 7, 6, 8)"]),
    "no-keys": (
        {
            "k": torch.zeros(2, 0, 3, 4),
            "v": torch.zeros(2, 0, 3, 8),
            "k_noise": torch.zeros(2, 0, 3, 4),
        },
        "k",
        ["at least one key", "S = 0"],
    ),
    "key-heads-do-not-divide": (
        {
            "k": torch.zeros(2, 7, 4, 4),
            "v": torch.zeros(2, 7, 4, 8),
            "k_noise": torch.zeros(2, 7, 4, 4),
        },
        "k",
        ["4 key/value heads", "6 heads"],
    ),
    "noise-heads-do-not-divide": (
        {"q_noise": torch.zeros(2, 5, 4, 4)},
        "q_noise",
        ["4 noise heads", "6 signal heads"],
    ),
    "more-noise-than-signal": (
        {"q_noise": torch.zeros(2, 5, 12, 4)},
        "q_noise",
        ["12 noise heads", "6 signal heads"],
    ),
    "pair-across-groups": (
        {"q_noise": torch.zeros(2, 5, 2, 4)},
        "q_noise",
        ["3 key/value heads", "2 noise heads"],
    ),
    "q-noise-time": (
        {"q_noise": torch.zeros(2, 4, 6, 4)},
        "q_noise",
        ["(2, 5, N, 4)", "(2, 4, 6, 4)"],
    ),
    "k-noise-shape": (
        {"k_noise": torch.zeros(2, 7, 6, 4)},
        "k_noise",
        ["(2, 7, 3, 4)", "(2, 7, 6, 4)"],
    ),
    "k-dtype": (
        {"k": torch.zeros(2, 7, 3, 4, dtype=torch.float64)},
        "k",
        ["torch.float32", "torch.float64"],
    ),
    "v-dtype": (
        {"v": torch.zeros(2, 7, 3, 8, dtype=torch.bfloat16)},
        "v",
        ["torch.float32", "torch.bfloat16"],
    ),
    "q-integer": ({"q": torch.zeros(2, 5, 6, 4, dtype=torch.int64)}, "q", ["torch.int64"]),
    "q-noise-dtype": (
        {"q_noise": torch.zeros(2, 5, 6, 4, dtype=torch.float64)},
        "q_noise",
        ["torch.float32", "torch.float64"],
    ),
    "k-noise-dtype": (
        {"k_noise": torch.zeros(2, 7, 3, 4, dtype=torch.float16)},
        "k_noise",
        ["torch.float32", "torch.float16"],
    ),
    "lam-heads": ({"lam": torch.zeros(5)}, "lam", ["[6]", "[2, 5, 6]", "(5,)"]),
    "lam-token": ({"lam": torch.zeros(2, 6, 5)}, "lam", ["[2, 5, 6]", "(2, 6, 5)"]),
    "lam-last-axis": ({"lam": torch.zeros(2, 5, 6, 1)}, "lam", ["[2, 5, 6]", "(2, 5, 6, 1)"]),
    "mask-keys": (
        {"mask": torch.ones(2, 1, 5, 6, dtype=torch.bool)},
        "mask",
        ["(2, 6, 5, 7)", "(2, 1, 5, 6)"],
    ),
    "mask-two-dimensional-padding": (
        {"mask": torch.ones(2, 7, dtype=torch.bool)},
        "mask",
        ["(2, 6, 5, 7)", "(2, 7)"],
    ),
    "mask-five-axes": (
        {"mask": torch.ones(1, 1, 1, 5, 7, dtype=torch.bool)},
        "mask",
        ["(2, 6, 5, 7)", "(1, 1, 1, 5, 7)"],
    ),
    "mask-integer": ({"mask": torch.ones(5, 7, dtype=torch.int64)}, "mask", ["torch.int64"]),
    "mask-by-head-with-shared-noise": (
        {
            "q_noise": torch.zeros(2, 5, 3, 4),
            "mask": torch.ones(2, 6, 5, 7, dtype=torch.bool),
        },
        "mask",
        ["2 signal heads", "(2, 6, 5, 7)"],
    ),
    "mask-list": ({"mask": [[True] * 7] * 5}, "mask", ["tensor", "list"]),
    "mask-no-axes": ({"mask": torch.tensor(True)}, "mask", ["(2, 6, 5, 7)", "()"]),
    "q-list": ({"q": [0.0]}, "q", ["tensor", "list"]),
    "k-number": ({"k": 1.0}, "k", ["tensor", "float"]),
    "v-none": ({"v": None}, "v", ["tensor", "NoneType"]),
    "q-noise-none": ({"q_noise": None}, "q_noise", ["tensor", "NoneType"]),
    "k-noise-list": ({"k_noise": []}, "k_noise", ["tensor", "list"]),
    "lam-text": ({"lam": "0.2"}, "lam", ["number", "str"]),
    "sink-number": ({"sink": 0.0, "sink_noise": torch.zeros(6)}, "sink", ["tensor", "float"]),
    "sink-heads": (
        {"sink": torch.zeros(5), "sink_noise": torch.zeros(6)},
        "sink",
        ["[6]", "(5,)"],
    ),
    "sink-alone": ({"sink": torch.zeros(6)}, "sink_noise", ["both maps", "None"]),
    "sink-noise-alone": ({"sink_noise": torch.zeros(6)}, "sink", ["both maps", "None"]),
    "softcap-zero": ({"softcap": 0.0}, "softcap", ["above 0", "0.0"]),
    "softcap-text": ({"softcap": "3"}, "softcap", ["number", "'3'"]),
    "softcap-nan": ({"softcap": float("nan")}, "softcap", ["number", "nan"]),
    "softcap-bool": ({"softcap": True}, "softcap", ["number", "True"]),
    "scale-text": ({"scale": "1"}, "scale", ["finite number", "'1'"]),
    "scale-infinite": ({"scale": float("inf")}, "scale", ["finite number", "inf"]),
    "window-fraction": ({"window": 2.0}, "window", ["whole number", "2.0"]),
    "window-bool": ({"window": True}, "window", ["whole number", "True"]),
    "window-text": ({"window": "2"}, "window", ["whole number", "'2'"]),
    "dropout-text": ({"dropout": "0"}, "dropout", ["[0, 1)", "'0'"]),
    "window-zero": ({"window": 0}, "window", ["at least 1", "got 0"]),
    "window-negative": ({"window": -1}, "window", ["at least 1", "got -1"]),
    "dropout-one": ({"dropout": 1.0}, "dropout", ["[0, 1)", "1.0"]),
    "dropout-negative": ({"dropout": -0.1}, "dropout", ["[0, 1)", "-0.1"]),
    "dropout-masks": ({"dropout_masks": "both"}, "dropout_masks", ["'shared'", "'both'"]),
    "impl-unknown": ({"impl": "flash"}, "impl", ["'sdpa'", "'flash'"]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_bad_argument_is_named(case):
    changes, name, parts = CASES[case]
    with pytest.raises(ValueError) as caught:
        diff_attention(**tensors(**changes))
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    for part in parts:
        assert part in message


OF_MAPS = inspect.signature(diff_attention_maps).parameters


@pytest.mark.parametrize("case", [case for case in CASES if set(CASES[case][0]) <= set(OF_MAPS)])
def test_the_maps_refuse_what_the_operator_refuses(case):
    changes, name, parts = CASES[case]
    given = {key: value for key, value in tensors(**changes).items() if key in OF_MAPS}
    with pytest.raises(ValueError) as caught:
        diff_attention_maps(**given)
    assert str(caught.value).startswith(f"{name}: ")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["q", "q_noise", "k", "v", "k_noise"])
def test_time_and_heads_swapped_are_refused(name):
    """Heads 3, time 5: the message gives the order of the axes."""
    good = {
        "q": torch.zeros(2, 5, 3, 4),
        "k": torch.zeros(2, 5, 3, 4),
        "v": torch.zeros(2, 5, 3, 8),
        "q_noise": torch.zeros(2, 5, 3, 4),
        "k_noise": torch.zeros(2, 5, 3, 4),
    }
    good[name] = good[name].transpose(1, 2)
    with pytest.raises(ValueError, match=r"5") as caught:
        diff_attention(**good, lam=0.2)
    assert "3" in str(caught.value)


def test_everything_swapped_is_refused_where_heads_cannot_be_told_from_time():
    """(batch, heads, time, width) throughout: 5 keys would be 5 heads that do not divide."""
    with pytest.raises(ValueError, match="7 key/value heads do not divide the 5 heads"):
        softmax_attention(torch.zeros(1, 3, 5, 4), *torch.zeros(2, 1, 3, 7, 4).unbind(0))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"q": torch.zeros(5, 6, 4)}, "q"),
        ({"v": torch.zeros(2, 6, 3, 8)}, "v"),
        ({"window": 0}, "window"),
        ({"dropout": 1.0}, "dropout"),
        ({"impl": "one_call"}, "impl"),
        ({"mask": torch.ones(5, 6, dtype=torch.bool)}, "mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_softmax_attention_names_a_bad_argument(changes, name):
    good = {key: value for key, value in tensors().items() if key in ("q", "k", "v")}
    with pytest.raises(ValueError, match=rf"^{name}: "):
        softmax_attention(**{**good, **changes})


def test_rotary_names_a_bad_argument():
    with pytest.raises(ValueError, match=r"^dim: .* got 5"):
        rotary_angles(torch.arange(3), 5)
    cos, sin = rotary_angles(torch.arange(3), 8)
    with pytest.raises(ValueError, match=r"^cos: expected width 3 for heads of 6, got 4"):
        apply_rotary(torch.zeros(1, 3, 2, 6), cos, sin)
    with pytest.raises(ValueError, match=r"^style: .*'half'.* got 'neox'"):
        apply_rotary(torch.zeros(1, 3, 2, 8), cos, sin, style="neox")


def test_row_orders_name_a_bad_argument():
    with pytest.raises(ValueError, match=r"^rows: .* multiple of 8 rows, got 12"):
        half_split_to_adjacent(torch.zeros(12, 3), 4)
    with pytest.raises(ValueError, match=r"^head_dim: .* even width, got 3"):
        interleaved_to_half(torch.zeros(12, 3), 3)
    with pytest.raises(ValueError, match=r"^rows: .* multiple of 4 rows, got 6"):
        half_to_interleaved(torch.zeros(6, 3), 4)
