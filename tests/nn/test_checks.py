"""What a layer refuses, at construction and at a call, and in which words."""

import math

import pytest
import torch

from diffattn.nn import DiffAttention, PolyNorm, RMSNorm, SoftmaxAttention

WIDTH = 32
BUILDERS = {
    "SoftmaxAttention": lambda **o: SoftmaxAttention(WIDTH, num_heads=8, **o),
    "DiffAttention.v1": lambda **o: DiffAttention.v1(WIDTH, match_heads=8, **{"layer_idx": 0, **o}),
    "DiffAttention.v2": lambda **o: DiffAttention.v2(WIDTH, match_heads=8, **o),
    "DiffAttention.grouped": lambda **o: DiffAttention.grouped(
        WIDTH, ratio=2, match_heads=8, **{"layer_idx": 0, **o}
    ),
    "DiffAttention.grouped_latent": lambda **o: DiffAttention.grouped_latent(
        WIDTH, ratio=2, match_heads=8, **o
    ),
    "DiffAttention": lambda **o: DiffAttention(
        WIDTH,
        sizes=DiffAttention.v1(WIDTH, match_heads=8, layer_idx=0).sizes,
        lam="exponential",
        own_noise_key=True,
        head_norm=True,
        **{"layer_idx": 0, **o},
    ),
}
DIFFERENTIAL = [name for name in BUILDERS if name != "SoftmaxAttention"]
EVERY = pytest.mark.parametrize("name", list(BUILDERS))

BAD = {
    "rope_theta": ((-1.0, 0.0, math.nan, math.inf, "1e4"), "expected a finite number above 0"),
    "norm_eps": ((-1.0, math.nan, math.inf), "expected a finite number, at least 0"),
    "qk_norm_eps": ((-1.0, math.nan, math.inf), "expected a finite number, at least 0"),
}
BAD_IN_DIFFERENTIAL = {
    "lambda_std": ((-0.1, math.nan, math.inf, None), "expected a finite number, at least 0"),
    "lambda_start": ((math.nan, math.inf), "expected a finite number"),
    "lambda_offset": ((math.nan, math.inf), "expected a finite number"),
    "layer_idx": ((math.nan, math.inf), "expected a finite number"),
}


@EVERY
def test_numbers_that_give_nan_are_refused_at_construction(name):
    cases = BAD if name == "SoftmaxAttention" else BAD | BAD_IN_DIFFERENTIAL
    for option, (values, expected) in cases.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{option}: {expected}, got {value!r}$"):
                BUILDERS[name](qk_norm=True, **{option: value})


@pytest.mark.parametrize("norm", [lambda eps: RMSNorm(4, eps=eps), lambda eps: PolyNorm(eps=eps)])
@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf])
def test_norms_refuse_an_epsilon_that_gives_nan(norm, eps):
    with pytest.raises(ValueError, match=r"^eps: expected a finite number, at least 0, got "):
        norm(eps)


@EVERY
def test_a_layer_without_keys_says_so(name):
    layer = BUILDERS[name](query_only=True)
    with pytest.raises(ValueError, match=r"^key_values: this layer is query_only; call the layer"):
        layer.key_values(torch.randn(1, 3, WIDTH))
    with pytest.raises(ValueError, match=r"^context_size: expected None in a query_only .* got 13"):
        BUILDERS[name](query_only=True, context_size=13)


@EVERY
@pytest.mark.parametrize("shape", [(3, WIDTH), (2, 3, WIDTH + 1), (2, 3, 4, WIDTH), ()])
def test_an_input_of_another_shape_is_named(name, shape):
    layer, wrong = BUILDERS[name](causal=False), torch.randn(shape)
    expected = rf"expected \[B, {{}}, hidden_size\] = \[B, {{}}, {WIDTH}\], got shape "
    for argument, call, letter in (
        ("x", lambda: layer(wrong), "T"),
        ("context", lambda: layer(torch.randn(2, 3, WIDTH), wrong), "S"),
        ("context", lambda: layer.key_values(wrong), "S"),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: {expected.format(letter, letter)}"):
            call()


def test_a_context_of_another_width_is_named():
    layer = BUILDERS["DiffAttention.v1"](causal=False, context_size=13)
    x = torch.randn(2, 3, WIDTH)
    for call in (lambda: layer(x), lambda: layer(x, x)):
        with pytest.raises(ValueError, match=r"^context: expected \[B, S, context_size\] = .* 13"):
            call()


def test_a_layer_of_keys_alone_checks_the_queries_of_another():
    layer = BUILDERS["DiffAttention.v1"](query_only=True)
    held = BUILDERS["DiffAttention.v1"]().key_values(torch.randn(2, 3, WIDTH))
    with pytest.raises(ValueError, match=r"^x: expected \[B, T, hidden_size\]"):
        layer(torch.randn(3, WIDTH), key_values=held)


@EVERY
def test_an_unknown_option_names_what_was_called(name):
    with pytest.raises(TypeError) as caught:
        BUILDERS[name](qknorm=True)
    assert str(caught.value) == (
        f"{name}() got an unexpected keyword argument 'qknorm'; did you mean 'qk_norm'?"
    )
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        BUILDERS[name](zzz=1)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIAL if "." in name])
def test_what_a_preset_fixes_is_no_option_of_it(name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'lam'"):
        BUILDERS[name](lam="sigmoid")


def test_a_ratio_says_where_the_number_of_heads_comes_from():
    with pytest.raises(ValueError, match=r"^ratio: 3 .* num_diff_heads = match_heads / 2 = 4$"):
        DiffAttention.grouped(64, match_heads=8, ratio=3, layer_idx=1)
    with pytest.raises(ValueError, match=r"^ratio: 3 does not divide num_diff_heads = 4$"):
        DiffAttention.grouped(64, num_diff_heads=4, ratio=3, layer_idx=1)
