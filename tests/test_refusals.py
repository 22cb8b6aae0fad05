"""Combinations that nothing serves: each is refused in its own words, none falls back."""

import pytest
import torch

from diffattn import DiffAttention, SoftmaxAttention, diff_attention, softmax_attention
from diffattn.nn import DiffSizes, KeyValueCache, match_v1


def operands(noise_heads=4, groups=4):
    q, k = torch.randn(1, 6, 4, 4), torch.randn(1, 6, groups, 4)
    return q, k, torch.randn(1, 6, groups, 8), torch.randn(1, 6, noise_heads, 4), k


def x(length=3):
    return torch.randn(1, length, 32)


def v1(**options):
    return DiffAttention.v1(32, match_heads=4, layer_idx=0, **options)


LAYERS = {
    "shared dropout behind torch's kernel": (
        lambda: diff_attention(*operands(), lam=0.2, dropout=0.1, impl="sdpa"),
        "impl='sdpa' draws a dropout mask for each map",
    ),
    "shared dropout behind one call": (
        lambda: v1(dropout=0.1, impl="one_call"),
        "impl='one_call' draws a dropout mask for each map",
    ),
    "soft cap behind torch's kernel": (
        lambda: diff_attention(*operands(), lam=0.2, softcap=5.0, impl="sdpa"),
        "impl='sdpa' runs torch's kernel, which takes no softcap",
    ),
    "soft cap behind one call": (
        lambda: v1(softcap=5.0, impl="one_call"),
        "impl='one_call' runs torch's kernel, which takes no softcap",
    ),
    "soft cap in blocks": (
        lambda: diff_attention(*operands(), lam=0.2, softcap=5.0, impl="blocked"),
        "impl='blocked' has no softcap",
    ),
    "dropout in blocks": (
        lambda: v1(dropout=0.1, impl="blocked"),
        "impl='blocked' has no dropout",
    ),
    "a learned bias in blocks": (
        lambda: diff_attention(
            *operands(), lam=0.2, mask=torch.zeros(6, 6, requires_grad=True), impl="blocked"
        ),
        "impl='blocked' has no gradient of a mask",
    ),
    "softmax attention by one call for two maps": (
        lambda: softmax_attention(*operands()[:3], impl="one_call"),
        "impl: expected 'auto', 'reference', 'sdpa', 'blocked' or 'fused', got 'one_call'",
    ),
    "an implementation that does not exist": (
        lambda: diff_attention(*operands(), lam=0.2, impl="flash"),
        "impl: expected 'auto' or one of .* got 'flash'",
    ),
    "a mask for each head where heads share noise": (
        lambda: diff_attention(
            *operands(2, 2), lam=0.2, mask=torch.ones(1, 4, 6, 6, dtype=torch.bool)
        ),
        "mask: 2 signal heads share a noise head, so the head axis must be 1",
    ),
    "a pair that reads two key groups": (
        lambda: DiffSizes(
            num_diff_heads=4, num_noise_heads=2, num_key_value_heads=4, head_dim=4, value_dim=8
        ),
        "num_key_value_heads: 4 key/value heads do not divide 2 noise heads",
    ),
    "key heads that do not pair": (
        lambda: match_v1(32, match_heads=4, match_key_value_heads=1),
        "match_key_value_heads: V1 pairs the key heads, so it needs an even number, got 1",
    ),
    "a sink for one of two maps": (
        lambda: diff_attention(*operands(), lam=0.2, sink=torch.zeros(4)),
        "sink_noise: expected a sink for both maps or for neither",
    ),
    "another sequence in a causal layer": (
        lambda: v1()(x(), x()),
        "context: a causal layer attends to itself",
    ),
    "another sequence with rotary positions": (
        lambda: v1(causal=False, rope_theta=1e4)(x(), x()),
        "context: rotary positions are defined for self-attention",
    ),
    "another sequence with a cache": (
        lambda: v1(causal=False)(x(), x(), cache=KeyValueCache()),
        "cache: expected None with a context",
    ),
    "a cache in a layer without keys": (
        lambda: v1(query_only=True)(x(), key_values=(x(), x()), cache=KeyValueCache()),
        "cache: expected None in a query_only layer",
    ),
    "no keys at all": (
        lambda: v1(query_only=True)(x()),
        "key_values: expected those of another layer",
    ),
    "keys of two layers": (
        lambda: SoftmaxAttention(32, num_heads=4)(x(), key_values=(x(), x())),
        "key_values: this layer has keys of its own",
    ),
    "rotary positions of an odd width": (
        lambda: v1(head_dim=5, rope_theta=1e4),
        "head_dim: rotary positions need an even width, got 5",
    ),
    "an epsilon that no root is taken of": (
        lambda: v1(norm_eps=-1.0),
        "eps: expected a finite number, at least 0, got -1.0",
    ),
    "a soft cap in words": (
        lambda: v1(softcap="3"),
        "softcap: expected a number above 0, got '3'",
    ),
    "a start value where nothing starts": (
        lambda: DiffAttention.v2(32, match_heads=4, lambda_start=0.3),
        "lambda_start: a sigmoid lam without head norm has no start value",
    ),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_refuse(name):
    call, sentence = LAYERS[name]
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        call()


def model_cases():
    """The same for the language models, which need the extra hf."""
    import tiny
    from transformers import StaticCache
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def static_flex():
        model = tiny.model("v1", "flex_attention")
        model(tiny.tokens(1, 4), cache=StaticCache(config=model.config, max_cache_len=8))

    def unknown_kernel():
        ALL_ATTENTION_FUNCTIONS.register("unknown", lambda *a, **k: None)
        ALL_MASK_ATTENTION_FUNCTIONS.register("unknown", eager_mask)
        try:
            tiny.model("v2", "unknown", attention_sink=True)(tiny.tokens(1, 4))
        finally:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop("unknown")
            ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop("unknown")

    return {
        "sinks behind torch's kernel": (
            lambda: tiny.model("v1", "sdpa", attention_sink=True),
            "attn_implementation='sdpa' runs torch's kernel, which takes no attention_sink",
        ),
        "soft cap behind torch's kernel": (
            lambda: tiny.model("v1", "sdpa", attention_softcap=5.0),
            "attn_implementation='sdpa' runs torch's kernel, which takes no attention_softcap",
        ),
        "sinks behind a kernel that nobody knows": (
            unknown_kernel,
            "attn_implementation='unknown' is not known to honour attention_sink",
        ),
        "a static cache behind flex_attention": (
            static_flex,
            "attn_implementation='flex_attention' would let queries see later keys",
        ),
        "maps from a kernel that has none": (
            lambda: tiny.model("v1", "sdpa")(tiny.tokens(1, 4), output_attentions=True),
            "output_attentions: attn_implementation='sdpa' returns no maps",
        ),
        "rotary positions that are scaled": (
            lambda: tiny.config("v1", rope_parameters={"rope_type": "yarn", "factor": 2.0}),
            "rope_type: expected 'default', got 'yarn'",
        ),
        "a window that no layer uses": (
            lambda: tiny.config("v1", sliding_window=4, layer_types=["full_attention"] * 2),
            "sliding_window: 4 does not fit layer_types",
        ),
        "a kernel's geometry that the kind does not have": (
            lambda: tiny.config("v2", num_attention_heads=8),
            "num_attention_heads: follows from attention and match_heads as 16, got 8",
        ),
    }


def test_models_refuse():
    pytest.importorskip("transformers", reason="models need the extra hf")
    for call, sentence in model_cases().values():
        with pytest.raises((ValueError, NotImplementedError), match=sentence):
            call()


def test_no_two_refusals_share_a_sentence():
    pytest.importorskip("transformers", reason="models need the extra hf")
    sentences = [sentence for _, sentence in (*LAYERS.values(), *model_cases().values())]
    assert len(set(sentences)) == len(sentences) >= 20
