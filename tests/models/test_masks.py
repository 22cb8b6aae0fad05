"""Padding, windows and packed documents in each row of a batch."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from transformers import DynamicCache, StaticCache

NAMES = ["eager", "sdpa"]
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize("kind", list(tiny.KINDS))
@torch.no_grad()
def test_eager_equals_sdpa(kind):
    ids = tiny.tokens(2, 20)
    eager, sdpa = (tiny.model(kind, name)(ids).logits for name in NAMES)
    torch.testing.assert_close(eager, sdpa, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("kind", "attn"), tiny.CASES)
@torch.no_grad()
def test_padded_prompts_equal_solo_runs(kind, attn, side):
    """Lengths 3 and 6; positions are counted from the mask."""
    model = tiny.model(kind, attn)
    prompts = [tiny.tokens(1, length, seed=length)[0] for length in (3, 6)]
    ids, mask = tiny.padded(prompts, 8, side)
    logits = model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    for row, prompt in enumerate(prompts):
        solo = model(prompt[None]).logits[0]
        torch.testing.assert_close(logits[row, mask[row] == 1], solo, **CLOSE)


@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", [*tiny.ONE_OF_EACH, "v1 sliding", "mixed windows"])
@torch.no_grad()
def test_left_padded_prompts_in_cached_steps_equal_solo_runs(kind, attn):
    """Positions of a step are counted from the mask alone; none are given."""
    model = tiny.model(kind, attn)
    prompts = [tiny.tokens(1, length, seed=length)[0] for length in (4, 8)]
    ids, mask = tiny.padded(prompts, 8)
    cache, parts = DynamicCache(config=model.config), []
    for stop in (6, 7, 8):
        step = slice(len(parts) and stop - 1, stop)
        out = model(ids[:, step], attention_mask=mask[:, :stop], cache=cache, use_cache=True)
        parts.append(out.logits)
    logits = torch.cat(parts, dim=1)
    for row, prompt in enumerate(prompts):
        solo = model(prompt[None]).logits[0]
        torch.testing.assert_close(logits[row, -len(prompt) :], solo, **CLOSE)


def show_windows(model, window):
    """Hand every layer a causal mask, with a window where the layer's type says so."""
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        w = window if kind == "sliding_attention" else 99

        def by_hand(module, args, kwargs, w=w):
            place = torch.arange(args[0].shape[1])
            distance = place[:, None] - place
            return args, {
                **kwargs,
                "attention_mask": ((distance >= 0) & (distance < w))[None, None],
            }

        layer.self_attn.register_forward_pre_hook(by_hand, with_kwargs=True)


@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", ["v1 sliding", "mixed windows"])
@torch.no_grad()
def test_windows_equal_masks_made_by_hand(kind, attn):
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 12)
    got = model(ids).logits
    wide = tiny.model(kind, attn, sliding_window=99)
    assert (wide(ids).logits - got)[:, 4:].abs().amax(-1).min() > 0.01
    show_windows(wide, window=4)
    torch.testing.assert_close(got, wide(ids).logits, **CLOSE)


@pytest.mark.parametrize("use_cache", [False, True], ids=["no-cache", "cache"])
@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", list(tiny.KINDS))
@torch.no_grad()
def test_packed_documents_have_the_losses_of_separate_ones(kind, attn, use_cache):
    """Documents of 3 and 5 tokens in one row, told apart by positions that start anew."""
    model = tiny.model(kind, attn)
    documents = [tiny.tokens(1, length, seed=length) for length in (3, 5)]
    packed = model(
        torch.cat(documents, dim=1),
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
        use_cache=use_cache,
    ).logits
    for document, logits in zip(documents, packed.split((3, 5), dim=1), strict=True):
        separate = model(document, use_cache=False).logits
        torch.testing.assert_close(logits, separate, **CLOSE)
        losses = [F.cross_entropy(l[0, :-1], document[0, 1:]) for l in (logits, separate)]
        torch.testing.assert_close(*losses, **CLOSE)
    leaking = model(torch.cat(documents, dim=1), use_cache=use_cache).logits
    assert (leaking[:, 3:] - packed[:, 3:]).abs().max() > 0.01


@pytest.mark.parametrize("given", ["a-mask-of-ones", "an-empty-cache"])
@torch.no_grad()
def test_packed_documents_stay_apart_whatever_else_is_given(given):
    """Neither says anything new, so neither may let the documents see each other."""
    model, ids = tiny.model("v1"), tiny.tokens(1, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    want = model(ids, position_ids=positions).logits
    if given == "a-mask-of-ones":
        options = {"attention_mask": torch.ones(1, 8, dtype=torch.long)}
    else:
        options = {"cache": DynamicCache(config=model.config), "use_cache": True}
    got = model(ids, position_ids=positions, **options).logits
    torch.testing.assert_close(got, want, **CLOSE)


FLAT = {
    "cu_seq_lens_q": torch.tensor([0, 3, 8], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 3, 8], dtype=torch.int32),
    "max_length_q": 5,
    "max_length_k": 5,
}


@pytest.mark.parametrize("positions", ["none", "anew", "counting on"])
@pytest.mark.parametrize("kind", ["softmax", "v1", "v2", "mixed windows"])
@pytest.mark.parametrize("attn", NAMES)
@torch.no_grad()
def test_cumulative_lengths_keep_documents_apart(kind, attn, positions):
    """The arguments of flash attention; transformers' eager and sdpa pass them over."""
    model = tiny.model(kind, attn)
    documents = [tiny.tokens(1, length, seed=length) for length in (3, 5)]
    given = {"anew": [0, 1, 2, 0, 1, 2, 3, 4], "counting on": list(range(8))}.get(positions)
    if given is not None:
        given = torch.tensor([given])
    packed = model(torch.cat(documents, dim=1), position_ids=given, **FLAT).logits
    for document, logits in zip(documents, packed.split((3, 5), dim=1), strict=True):
        torch.testing.assert_close(logits, model(document).logits, **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["v1", "v2", "mixed windows"])
@torch.no_grad()
def test_a_cached_chunk_may_end_one_document_and_begin_another(kind, cache):
    """Documents of 5 and 4 in chunks of 3 and 6: what is cached belongs to the first."""
    model = tiny.model(kind)
    documents = [tiny.tokens(1, length, seed=length) for length in (5, 4)]
    ids = torch.cat(documents, dim=1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    if cache == "static":
        cache = StaticCache(config=model.config, max_cache_len=11)
    else:
        cache = DynamicCache(config=model.config)
    parts = [
        model(ids[:, part], position_ids=positions[:, part], cache=cache, use_cache=True).logits
        for part in (slice(3), slice(3, 9))
    ]
    logits = torch.cat(parts, dim=1).split((5, 4), dim=1)
    for document, packed in zip(documents, logits, strict=True):
        torch.testing.assert_close(packed, model(document).logits, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("attn", NAMES)
def test_packed_documents_train_in_one_graph(attn):
    model, ids = tiny.model("mixed windows", attn).train(), tiny.tokens(1, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    want = model(ids, position_ids=positions, use_cache=False).logits
    got = compiled(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, **CLOSE)
