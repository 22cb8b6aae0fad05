"""Caches of every class of transformers: a cached run equals one full pass."""

import pytest
import tiny
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.generation import GenerationMixin

from diffattn.models import DiffTransformerForCausalLM, modeling_diff

CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize(("kind", "attn"), tiny.CASES)
@torch.no_grad()
def test_cached_logits_equal_the_full_pass_over_32_tokens(kind, attn):
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 32)
    full = model(ids, use_cache=False).logits
    assert full.std() > 0.3  # logits that could tell a difference
    for steps in ((7, *(1,) * 25), (3, 4, 5, 20)):
        torch.testing.assert_close(tiny.cached_logits(model, ids, steps), full, **CLOSE)


def static_cache_of_nan(model, length):
    """A static cache whose buffers hold NaN wherever no key has been written."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    for layer, block in zip(cache.layers, model.model.layers, strict=True):
        x = torch.zeros(2, 0, model.config.hidden_size)
        key, value = block.self_attn.keys(x, None), block.self_attn.values(x)
        key, value = block.self_attn.kernel_keys(key), block.self_attn.kernel_values(value)
        layer.lazy_initialization(key.transpose(1, 2), value.transpose(1, 2))
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    return cache


STEPS = [(7, 1, 1, 1, 1, 1), (3, 4, 5)]
BELOW_THE_WINDOW = (2, 1, 1, 1, 1, 6)


@pytest.mark.parametrize(("kind", "attn"), tiny.CASES)
@torch.no_grad()
def test_slots_not_in_use_may_hold_nan(kind, attn):
    runs = [(length, steps) for length in (16, 17, 64) for steps in STEPS]
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 12)
    full = model(ids, use_cache=False).logits
    for length, steps in [*runs, (17, BELOW_THE_WINDOW)]:
        cache = static_cache_of_nan(model, length)
        got = tiny.cached_logits(model, ids, steps, cache)
        torch.testing.assert_close(got, full, **CLOSE)


@pytest.mark.parametrize("kind", ["v1", "v2", "mixed windows"])
@torch.no_grad()
def test_padding_beside_slots_that_hold_nan(kind):
    model = tiny.model(kind)
    prompts = [tiny.tokens(1, length, seed=length)[0] for length in (4, 8)]
    ids, mask = tiny.padded(prompts, 8)
    cache, parts = static_cache_of_nan(model, 17), []
    for start, stop in ((0, 6), (6, 7), (7, 8)):
        out = model(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache, use_cache=True)
        parts.append(out.logits)
    logits = torch.cat(parts, dim=1)
    for row, prompt in enumerate(prompts):
        solo = model(prompt[None]).logits[0]
        torch.testing.assert_close(logits[row, -len(prompt) :], solo, **CLOSE)


@pytest.mark.parametrize("kind", ["v1", "mixed windows"])
@torch.no_grad()
def test_a_static_cache_is_used_again_after_a_reset(kind):
    model, ids = tiny.model(kind), tiny.tokens(4, 12)
    cache = static_cache_of_nan(model, 16)
    for rows in ids.split(2):
        got = tiny.cached_logits(model, rows, (7, 1, 4), cache)
        torch.testing.assert_close(got, model(rows, use_cache=False).logits, **CLOSE)
        cache.reset()


def compiled_steps(kind, attn, *, graphs, **options):
    model, ids = tiny.model(kind, attn, **options), tiny.tokens(2, 10)
    full = model(ids, use_cache=False).logits
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = static_cache_of_nan(model, 17)
    step = torch.compile(model, backend="eager", fullgraph=True)
    parts = [model(ids[:, :2], cache=cache, use_cache=True).logits]
    parts += [step(ids[:, t : t + 1], cache=cache, use_cache=True).logits for t in range(2, 10)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, **CLOSE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@torch.no_grad()
def test_compiled_steps_are_one_graph_and_see_no_nan():
    compiled_steps("v2", "sdpa", graphs=1, num_hidden_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("kind", "graphs"), [("v1", 1), ("v2", 1), ("v1 sliding", 3), ("mixed windows", 3)]
)
@torch.no_grad()
def test_compiled_steps_of_other_kinds(kind, attn, graphs):
    """Windows compile three times: before the window is full, as it fills, and after."""
    compiled_steps(kind, attn, graphs=graphs)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("softmax-gqa", {}),
        ("v1-gqa", {}),
        ("v1-gqa", {"match_head_dim": 12}),
        ("v2-gqa", {"match_head_dim": 12}),
        ("v2", {"wide_values": True}),
        ("v1", {"wide_values": False}),
        ("grouped", {"match_head_dim": 12}),
        ("grouped_latent", {"match_head_dim": 12}),
    ],
)
@torch.no_grad()
def test_cached_widths_are_as_published(kind, options, cache):
    """Keys as the configuration says; values too, or as wide as the layer's own if more."""
    model = tiny.writer(kind, **options)
    config = model.config
    held = {
        "dynamic": DynamicCache(config=config),
        "static": StaticCache(config=config, max_cache_len=8),
    }[cache]
    # two names of one argument: "cache" since transformers 5.24
    out = model.generate(
        tiny.tokens(2, 5),
        max_new_tokens=3,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        **{modeling_diff._CACHE_FIELD: held},
    )
    assert out.sequences.shape == (2, 8)
    keys, values = held.layers[0].keys, held.layers[0].values
    slots = 7 if cache == "dynamic" else 8
    assert keys.shape == (2, config.num_key_value_heads, slots, config.head_dim)
    own = model.model.layers[0].self_attn.value_dim
    assert values.shape == (*keys.shape[:3], max(config.head_dim, own))
    width = options.get("match_head_dim", 8)
    twice = 2 if config.attention in ("v1", "grouped") else 1
    assert config.head_dim == twice * width


# root mean square of the error in units of the logits' spread; V1 is the most sensitive, as its
# head norm divides by the small difference of two maps
QUANTISED = {
    "fp8": ({"backend": "fp8"}, None, 0.06),
    "hqq, 8 bits": (
        {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
        "hqq.core.quantize",
        0.005,
    ),
    "hqq, 4 bits": (
        {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
        "hqq.core.quantize",
        0.06,
    ),
    "quanto, 4 bits": ({"backend": "quanto", "nbits": 4}, "optimum.quanto", 0.06),
}


@pytest.mark.parametrize("form", list(QUANTISED))
@pytest.mark.parametrize(
    "kind", ["softmax", "v1-gqa", "v2-gqa", "grouped", "grouped_latent", "mixed"]
)
@torch.no_grad()
def test_a_quantised_cache_stays_near_the_full_pass(kind, form):
    options, package, bound = QUANTISED[form]
    if package is not None:
        pytest.importorskip(package, reason="an optional backend of transformers' QuantizedCache")
        options = {"q_group_size": 16, "residual_length": 8, **options}
    model, ids = tiny.model(kind), tiny.tokens(2, 32)
    try:
        cache = QuantizedCache(config=model.config, **options)
    except ValueError:
        pytest.skip(reason="this transformers has no such backend")
    full = model(ids, use_cache=False).logits
    error = tiny.cached_logits(model, ids, (7, *(1,) * 25), cache) - full
    assert 1e-4 < error.square().mean().sqrt() / full.std() < bound
    layer = cache.layers[0]
    for held in (
        layer._dequantize(layer._quantized_keys),
        layer._dequantize(layer._quantized_values),
    ):
        assert held.shape[1] == model.config.num_key_value_heads
        assert held.shape[3] == model.config.head_dim


def test_a_quantised_cache_holds_no_windows():
    """A refusal of transformers."""
    with pytest.raises(ValueError, match="only full attention layers"):
        QuantizedCache("fp8", config=tiny.config("v1 sliding"))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "kind", [*tiny.ONE_OF_EACH, "grouped_latent", "v1 sliding", "mixed windows"]
)
@torch.no_grad()
def test_turns_of_a_conversation_equal_one_full_pass(kind, cache):
    """Three turns: the user's tokens and the model's answer, with one cache through all."""
    model, text = tiny.model(kind), torch.zeros(2, 0, dtype=torch.long)
    if cache == "static":
        cache = StaticCache(config=model.config, max_cache_len=40)
    else:
        cache = DynamicCache(config=model.config)
    steps = []
    for turn, length in enumerate((5, 6, 3)):
        start = text.shape[1]
        text = torch.cat((text, tiny.tokens(2, length, seed=turn)), dim=1)
        out = model.generate(
            text,
            attention_mask=torch.ones_like(text),  # else a generated 0 would count as padding
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **{modeling_diff._CACHE_FIELD: cache},
        )
        text = out.sequences
        steps.append((start + length, torch.stack(out.logits, dim=1)))
    full = model(text, use_cache=False).logits
    for prompt, logits in steps:
        torch.testing.assert_close(logits, full[:, prompt - 1 : prompt + 4], **CLOSE)
    if "full_attention" in model.config.layer_types:  # windows end within the last turn
        other = text.clone()
        other[:, :5] = 1
        assert (model(other, use_cache=False).logits - full)[:, -5:].abs().max() > 1e-3


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


@pytest.mark.parametrize("kind", ["v1", "v2", "grouped"])
@torch.no_grad()
def test_bf16_cached_logits_stay_near_the_full_pass(kind):
    """Stated bound for bf16: cached and full logits differ by at most 5 % of their spread."""
    model, ids = tiny.model(kind).bfloat16(), tiny.tokens(2, 32)
    full = model(ids, use_cache=False).logits.float()
    cached = tiny.cached_logits(model, ids, (7, *(1,) * 25)).float()
    assert (cached - full).abs().max() < 0.05 * full.std() * 4
