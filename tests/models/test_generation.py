"""Caches: a cached run equals one full pass, token by token."""

import pytest
import tiny
import torch
from transformers import StaticCache
from transformers.generation import GenerationMixin

from diffattn.models import DiffTransformerForCausalLM, modeling_diff

CLOSE = {"rtol": 0, "atol": 1e-5}


def cached_logits(model, ids, steps, cache=None):
    """Logits of a run in steps with the cache handed from each to the next."""
    parts = []
    for chunk in ids.split(steps, dim=1):
        out = model(chunk, cache=cache, use_cache=True)
        cache = getattr(out, modeling_diff._CACHE_FIELD)
        parts.append(out.logits)
    assert cache.get_seq_length() == ids.shape[1]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", list(tiny.KINDS))
@torch.no_grad()
def test_cached_logits_equal_the_full_pass_over_32_tokens(kind, attn):
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 32)
    full = model(ids, use_cache=False).logits
    assert full.std() > 0.3  # logits that could tell a difference
    torch.testing.assert_close(cached_logits(model, ids, (7, *(1,) * 25)), full, **CLOSE)
    torch.testing.assert_close(cached_logits(model, ids, (3, 4, 5, 20)), full, **CLOSE)


@pytest.mark.parametrize("kind", list(tiny.KINDS))
@torch.no_grad()
def test_generation_equals_greedy_search_without_a_cache(kind):
    model, ids = tiny.model(kind), tiny.tokens(2, 4)
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    out = model.generate(
        ids, use_cache=True, return_dict_in_generate=True, output_logits=True, **options
    )
    full = model(out.sequences[:, :-1], use_cache=False).logits[:, 3:]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), full, **CLOSE)
    assert torch.equal(out.sequences, model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [16, 17, 64])
@pytest.mark.parametrize("kind", tiny.ONE_OF_EACH)
@torch.no_grad()
def test_a_static_cache_of_any_length_equals_the_full_pass(kind, length, attn):
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 12)
    full = model(ids, use_cache=False).logits
    for steps in ((7, 1, 1, 1, 1, 1), (3, 4, 5)):
        cache = StaticCache(config=model.config, max_cache_len=length)
        torch.testing.assert_close(cached_logits(model, ids, steps, cache), full, **CLOSE)


@pytest.mark.parametrize("kind", ["v1-gqa", "v2-gqa"])
@torch.no_grad()
def test_cached_widths_are_the_kernels(kind):
    model = tiny.model(kind)
    out = model(tiny.tokens(2, 5), use_cache=True)
    layer = getattr(out, modeling_diff._CACHE_FIELD).layers[0]
    config = model.config
    assert layer.keys.shape == (2, config.num_key_value_heads, 5, config.head_dim)
    assert layer.values.shape[:3] == (2, config.num_key_value_heads, 5)
    assert layer.values.shape[3] == model.model.layers[0].self_attn.value_dim


@torch.no_grad()
def test_the_older_name_of_the_cache_is_understood():
    model, ids = tiny.model("v1"), tiny.tokens(1, 8)
    first = model(ids[:, :5], use_cache=True)
    cache = getattr(first, modeling_diff._CACHE_FIELD)
    second = model(ids[:, 5:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(second.logits, model(ids).logits[:, 5:], **CLOSE)


def test_without_use_cache_no_cache_is_returned():
    out = tiny.model("v1")(tiny.tokens(1, 4), use_cache=False)
    assert getattr(out, modeling_diff._CACHE_FIELD) is None


def test_generate_is_inherited_explicitly():
    assert GenerationMixin in DiffTransformerForCausalLM.__mro__


@pytest.mark.parametrize("kind", ["v1", "v2"])
@torch.no_grad()
def test_beams_reorder_the_cache(kind):
    model = tiny.model(kind)
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    ids = tiny.tokens(2, 4)
    with_cache = model.generate(ids, use_cache=True, **options)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("kind", ["v1", "v2", "grouped"])
@torch.no_grad()
def test_bf16_generation_stays_near_the_full_pass(kind):
    """Stated bound for bf16: cached and full logits differ by at most 5 % of their spread."""
    model, ids = tiny.model(kind).bfloat16(), tiny.tokens(2, 32)
    full = model(ids, use_cache=False).logits.float()
    cached = cached_logits(model, ids, (7, *(1,) * 25)).float()
    assert (cached - full).abs().max() < 0.05 * full.std() * 4
