"""Every way of generating text gives what the same way gives without a cache."""

import functools

import pytest
import tiny
import torch
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

GREEDY = {"do_sample": False, "pad_token_id": 0}
KINDS = [*tiny.ONE_OF_EACH, "grouped_latent", "v1 sliding", "mixed windows", "gated qk-norm"]
CLOSE = {"rtol": 0, "atol": 2e-5}


@functools.cache
def writer(kind, attn="sdpa"):
    """A model and a prompt, with the text that greedy search writes without a cache."""
    model, ids = tiny.writer(kind, attn), tiny.tokens(2, 6)
    text = write(model, ids, use_cache=False)
    assert min(len(set(row[6:].tolist())) for row in text) >= 4  # no token that repeats itself
    return model, ids, text


def write(model, ids, **options):
    options = {"max_new_tokens": 10, **GREEDY, **options}
    # without a mask, a generated 0 would count as padding
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


@pytest.mark.parametrize(
    ("kind", "attn"), [*((kind, "sdpa") for kind in tiny.KINDS), *tiny.EAGER_CASES]
)
@torch.no_grad()
def test_cached_logits_of_greedy_search_equal_one_full_pass(kind, attn):
    model, ids, text = writer(kind, attn)
    out = write(model, ids, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(out.sequences, text)
    full = model(text[:, :-1], use_cache=False).logits[:, 5:]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), full, **CLOSE)


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 2}])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_static_cache_and_a_prompt_read_in_chunks_write_the_same(kind, options):
    model, ids, text = writer(kind)
    assert torch.equal(write(model, ids, **options), text)


@pytest.mark.parametrize("cache", ["dynamic", "sliding_window", "hybrid"])
@torch.no_grad()
def test_caches_by_their_other_names_write_the_same(cache):
    if cache not in ALL_CACHE_IMPLEMENTATIONS:
        pytest.skip(reason="this transformers has no such name")
    model, ids, text = writer("mixed windows")
    assert torch.equal(write(model, ids, cache_implementation=cache), text)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_beams_reorder_the_cache(kind, cache):
    model, ids, _ = writer(kind)
    got = write(model, ids, num_beams=3, max_new_tokens=6, cache_implementation=cache)
    assert torch.equal(got, write(model, ids, num_beams=3, max_new_tokens=6, use_cache=False))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_sampling_draws_the_same_tokens(kind):
    model, ids, text = writer(kind)

    def sample(use_cache):
        torch.manual_seed(5)
        return write(model, ids, do_sample=True, top_k=0, use_cache=use_cache)

    drawn = sample(True)
    assert torch.equal(drawn, sample(False))
    assert not torch.equal(drawn, text)


@pytest.mark.parametrize("helper", ["smaller", "itself", "its first layer", "the prompt"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_assisted_decoding_writes_what_greedy_search_writes(kind, helper):
    """Proposals of several tokens are read at once, and the cache is cut back to what holds."""
    model, ids, text = writer(kind)
    ids, text = ids[:1], text[:1]
    if helper == "the prompt":
        ids = torch.cat((ids, ids), dim=1)
        text = write(model, ids, use_cache=False)
        options = {"prompt_lookup_num_tokens": 3}
    elif helper == "its first layer":
        options = {"assistant_early_exit": 1}
    else:
        options = {"assistant_model": smaller() if helper == "smaller" else model}
    assert torch.equal(write(model, ids, **options), text)


@functools.cache
def smaller():
    return tiny.writer("v2", num_hidden_layers=1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_left_padded_batch_writes_what_each_row_writes_alone(kind, cache):
    model, _, _ = writer(kind)
    prompts = [tiny.tokens(1, length, seed=length)[0] for length in (3, 6)]
    ids, mask = tiny.padded(prompts, 6)
    options = {"max_new_tokens": 8, **GREEDY, "cache_implementation": cache}
    both = model.generate(ids, attention_mask=mask, **options)
    for row, prompt in zip(both, prompts, strict=True):
        alone = write(model, prompt[None], max_new_tokens=8, use_cache=False)[0]
        assert torch.equal(row[6:], alone[len(prompt) :])


WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("kind", "attn", "options"),
    [
        ("v1", "sdpa", {}),
        ("v2", "sdpa", {}),
        ("grouped", "sdpa", {}),
        ("grouped_latent", "sdpa", {}),
        ("v1", "sdpa", WINDOWS),
        ("sinks", "eager", {}),
        ("soft cap", "eager", {}),
    ],
)
def test_continuous_batching_writes_what_generate_writes(kind, attn, options):
    """Prompts of unequal lengths share passes of 16 tokens and pages of 4."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip(reason="needs transformers' ContinuousBatchingConfig")
    model = tiny.writer(kind, attn, **options)
    prompts = [tiny.tokens(1, length, seed=length) for length in (3, 6, 11)]
    want = [write(model, p, max_new_tokens=6)[0, p.shape[1] :].tolist() for p in prompts]
    assert len({tuple(tokens) for tokens in want}) == 3
    out = model.generate_batch(
        [p[0].tolist() for p in prompts],
        generation_config=transformers.GenerationConfig(max_new_tokens=6, **GREEDY),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=16, page_size=4, max_batch_tokens=16
        ),
        progress_bar=False,
    )
    got = [out[name].generated_tokens for name in sorted(out)]
    assert [out[name].error for name in out] == [None] * 3
    assert got == want


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("mixed", {}, "attention: continuous batching serves layers of one geometry"),
        ("v2", {"wide_values": True}, "wide_values: continuous batching serves values as wide"),
    ],
)
def test_continuous_batching_refuses_caches_of_different_shapes(kind, options, says):
    with pytest.raises(NotImplementedError, match=says):
        tiny.model(kind, **options).generate_batch([[1, 2, 3]])
