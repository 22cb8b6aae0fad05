"""Masks of four axes: prefixes, biases, rows without a visible key."""

import pytest
import tiny
import torch

from diffattn.nn import AttentionLayer
from diffattn.ops.patterns import alibi_bias, prefix_mask

CLOSE = {"rtol": 0, "atol": 1e-5}
LOWEST = torch.finfo(torch.float32).min
CAUSAL = torch.ones(10, 10, dtype=torch.bool).tril()
DIFFERENTIAL = ["softmax", "v1", "v2", "grouped", "grouped_latent", "gated qk-norm"]


def record_attention(model):
    """Inputs and outputs of every attention layer of later passes."""
    records = []

    def note(module, args, output):
        records.append((module, args[0].detach(), output[0]))

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(note)
    return records


def by_definition(layer, x, mask):
    """The layer's own forward pass, by the operator's reference implementation."""
    layer.causal, layer.rope_theta, layer.impl = False, layer.config.rope_theta, "reference"
    return AttentionLayer.forward(layer, x, mask=mask)


def added(visible, invisible=LOWEST):
    return torch.zeros(visible.shape).masked_fill(~visible, invisible)


FORMS = {
    "bool": lambda visible: visible,
    "lowest": added,
    "lowest of bf16": lambda visible: added(visible, torch.finfo(torch.bfloat16).min),
    "lowest of fp16": lambda visible: added(visible, torch.finfo(torch.float16).min),
    "infinite": lambda visible: added(visible, -torch.inf),
}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(
    ("kind", "attn"), [c for c in tiny.CASES if c[0] in (*DIFFERENTIAL, *tiny.EAGER_KINDS)]
)
@torch.no_grad()
def test_a_prefix_is_seen_from_everywhere(kind, attn, form):
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 10)
    visible = prefix_mask(torch.tensor([4, 7]), 10)
    records = record_attention(model)
    model(ids, attention_mask=FORMS[form](visible))
    assert len(records) == 2
    for layer, x, output in records:
        torch.testing.assert_close(output, by_definition(layer, x, visible), **CLOSE)
        causal = by_definition(layer, x, CAUSAL)
        assert (output - causal)[:, :3].abs().max() > 0.01


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", DIFFERENTIAL)
@torch.no_grad()
def test_a_bias_is_added_to_the_scores_of_both_maps(kind, attn):
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 10)
    bias = torch.randn(2, 1, 10, 10).masked_fill(~CAUSAL, -torch.inf)
    records = record_attention(model)
    model(ids, attention_mask=bias)
    for layer, x, output in records:
        torch.testing.assert_close(output, by_definition(layer, x, bias), **CLOSE)
        assert (output - by_definition(layer, x, CAUSAL)).abs().max() > 0.01


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["v1", "v2"])
@torch.no_grad()
def test_a_bias_for_each_head_stands_in_the_order_of_the_query_heads(kind, attn):
    """Pairs of signal and noise; ALiBi gives both the slope of their pair."""
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 10)
    heads = model.config.num_attention_heads // 2
    bias = alibi_bias(heads, 10, 10).masked_fill(~CAUSAL, -torch.inf)
    records = record_attention(model)
    model(ids, attention_mask=bias.repeat_interleave(2, dim=1))
    for layer, x, output in records:
        torch.testing.assert_close(output, by_definition(layer, x, bias), **CLOSE)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(("kind", "attn"), tiny.CASES)
def test_rows_that_see_nothing_give_zeros_and_finite_gradients(kind, attn, form):
    model, ids = tiny.model(kind, attn), tiny.tokens(2, 10)
    blind = torch.tensor([0, 3, 9])
    visible = CAUSAL[None, None].clone()
    visible[:, :, blind] = False
    labels = ids.clone()
    labels[:, [0, 1, 3, 4, 9]] = -100  # neither the rows nor what follows them
    records = record_attention(model)
    out = model(ids, attention_mask=FORMS[form](visible), labels=labels)
    out.loss.backward()
    assert len(records) == model.config.num_hidden_layers
    for _, _, output in records:
        assert (output[:, blind] == 0).all()
        assert output[:, [1, 2, 4]].abs().amax(-1).min() > 0
    assert out.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("kind", "attn"), tiny.CASES)
def test_padding_on_the_left_gives_zeros_and_finite_gradients(kind, attn):
    model = tiny.model(kind, attn)
    ids, mask = tiny.padded([tiny.tokens(1, n)[0] for n in (3, 6)], 8)
    records = record_attention(model)
    out = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    out.loss.backward()
    for _, _, output in records:
        assert (output[mask == 0] == 0).all()
        assert output[mask == 1].abs().amax(-1).min() > 0
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_layers_may_have_masks_of_their_own_by_type():
    model, ids = tiny.model("mixed windows"), tiny.tokens(2, 10)
    place = torch.arange(10)
    near = CAUSAL & (place[:, None] - place < 4)
    masks = {"full_attention": CAUSAL[None, None], "sliding_attention": near[None, None]}
    torch.testing.assert_close(model(ids, attention_mask=masks).logits, model(ids).logits, **CLOSE)
    one = model(ids, attention_mask=CAUSAL[None, None]).logits  # for all layers, as it is
    wide = tiny.model("mixed windows", sliding_window=99)
    torch.testing.assert_close(one, wide(ids).logits, **CLOSE)


@pytest.mark.parametrize(
    ("attn", "mask", "says"),
    [
        ("sdpa", torch.ones(2, 10, 10), "expected 2 axes, or 4 axes of bool or float"),
        ("eager", torch.ones(2, 1, 10, 10, dtype=torch.long), "of torch.int64"),
        ("flex_attention", torch.zeros(2, 8, 10, 10), "reads one mask for all heads, got 8"),
    ],
)
def test_other_forms_are_refused(attn, mask, says):
    with pytest.raises(ValueError, match=f"^attention_mask: .*{says}"):
        tiny.model("v1", attn)(tiny.tokens(2, 10), attention_mask=mask)
