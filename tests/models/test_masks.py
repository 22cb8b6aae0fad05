"""Padding, packed documents and causality under every attention name that runs here."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from transformers import DynamicCache

NAMES = ["eager", "sdpa"]
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize("kind", list(tiny.KINDS))
@torch.no_grad()
def test_eager_equals_sdpa(kind):
    ids = tiny.tokens(2, 20)
    eager, sdpa = (tiny.model(kind, name)(ids).logits for name in NAMES)
    torch.testing.assert_close(eager, sdpa, **CLOSE)


def left_padded(prompts, width):
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask


@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", list(tiny.KINDS))
@torch.no_grad()
def test_left_padded_prompts_equal_solo_runs(kind, attn):
    model = tiny.model(kind, attn)
    prompts = [tiny.tokens(1, length, seed=length)[0] for length in (3, 6)]
    ids, mask = left_padded(prompts, 8)
    logits = model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    for row, prompt in enumerate(prompts):
        solo = model(prompt[None]).logits[0]
        torch.testing.assert_close(logits[row, -len(prompt) :], solo, **CLOSE)


@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", tiny.ONE_OF_EACH)
@torch.no_grad()
def test_left_padded_prompts_in_cached_steps_equal_solo_runs(kind, attn):
    """Positions of a step are counted from the mask alone; none are given."""
    model = tiny.model(kind, attn)
    prompts = [tiny.tokens(1, length, seed=length)[0] for length in (4, 8)]
    ids, mask = left_padded(prompts, 8)
    cache, parts = DynamicCache(config=model.config), []
    for stop in (6, 7, 8):
        step = slice(len(parts) and stop - 1, stop)
        out = model(ids[:, step], attention_mask=mask[:, :stop], cache=cache, use_cache=True)
        parts.append(out.logits)
    logits = torch.cat(parts, dim=1)
    for row, prompt in enumerate(prompts):
        solo = model(prompt[None]).logits[0]
        torch.testing.assert_close(logits[row, -len(prompt) :], solo, **CLOSE)


@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", tiny.ONE_OF_EACH)
@torch.no_grad()
def test_left_padded_generation_equals_solo_generation(kind, attn):
    model = tiny.model(kind, attn)
    prompts = [tiny.tokens(1, length, seed=length)[0] for length in (3, 6)]
    ids, mask = left_padded(prompts, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    both = model.generate(ids, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        solo = model.generate(
            prompt[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **options
        )
        assert torch.equal(both[row, 6:], solo[0, len(prompt) :])


@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", ["v1", "v2", "grouped"])
def test_padding_gives_finite_gradients(kind, attn):
    model = tiny.model(kind, attn).train()
    ids, mask = left_padded([tiny.tokens(1, 3)[0], tiny.tokens(1, 6)[0]], 8)
    labels = ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


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


@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", list(tiny.KINDS))
@torch.no_grad()
def test_a_later_token_never_changes_earlier_logits(kind, attn):
    model, ids = tiny.model(kind, attn), tiny.tokens(1, 10)
    variants = ids.repeat(9, 1)  # row t differs from the first in token t + 1
    for t in range(9):
        variants[t, t + 1] = (ids[0, t + 1] + 7) % tiny.VOCABULARY
    base, changed = model(ids).logits[0], model(variants).logits
    for t in range(9):
        torch.testing.assert_close(changed[t, : t + 1], base[: t + 1], **CLOSE)
        assert (changed[t, t + 1] - base[t + 1]).abs().max() > 1e-3


@pytest.mark.parametrize("attn", NAMES)
@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_a_later_token_never_changes_earlier_logits_in_training(kind, attn):
    model, ids = tiny.model(kind, attn).train(), tiny.tokens(1, 10)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds).logits[0, 4].sum().backward()
    assert embeds.grad[0, :5].abs().amax(-1).min() > 0
    assert (embeds.grad[0, 5:] == 0).all()


@pytest.mark.parametrize("attn", NAMES)
@torch.no_grad()
def test_a_prepared_mask_of_four_axes_is_used_as_it_is(attn):
    model, ids = tiny.model("v1", attn), tiny.tokens(1, 6)
    visible = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    prepared = torch.zeros(1, 1, 6, 6).masked_fill(~visible, torch.finfo(torch.float32).min)
    got = model(ids, attention_mask=prepared).logits
    torch.testing.assert_close(got, model(ids).logits, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v1", "v2"])
@torch.no_grad()
def test_flex_attention_equals_eager(kind):
    """Forward alone, as torch has no backward of it on a CPU; compiling takes a minute."""
    model = tiny.model(kind, "flex_attention").requires_grad_(False)
    ids = tiny.tokens(2, 20)
    want = tiny.model(kind, "eager")(ids).logits
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=1e-4)
