"""The compiled kernel behind the attention interface: our models, and any other."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from diffattn.ops.fused import step
from diffattn.ops.fused.library import library

pytestmark = tiny.NEEDS_COMPILER
CLOSE = {"rtol": 0, "atol": 1e-5}


def gradients(model, ids, **options):
    """Loss, then the gradient of every parameter."""
    loss = model(ids, labels=ids, **options).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [*tiny.KINDS, "sinks"])
def test_loss_and_gradients_are_those_of_eager_attention(kind, padded):
    ids = tiny.tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask} if padded else {}
    both = [gradients(tiny.model(kind, attn), ids, **options) for attn in (tiny.FUSED, "eager")]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["v1", "v2", "grouped", "mixed windows"])
@torch.no_grad()
def test_slots_of_a_cache_that_hold_nan_are_never_read(kind):
    model, ids = tiny.model(kind, tiny.FUSED), tiny.tokens(2, 8)
    cache = StaticCache(config=model.config, max_cache_len=40)
    got = [model(ids[:, :4], past_key_values=cache).logits]
    for layer in cache.layers:
        layer.keys[:, :, 4:] = layer.values[:, :, 4:] = float("nan")
    for place in range(4, 8):
        got.append(model(ids[:, place : place + 1], past_key_values=cache).logits)
        for layer in cache.layers:
            layer.keys[:, :, place + 1 :] = layer.values[:, :, place + 1 :] = float("nan")
    torch.testing.assert_close(torch.cat(got, 1), model(ids).logits, **CLOSE)


def test_one_decoding_step_copies_no_cache(monkeypatch):
    """The kernel gets keys and values at the addresses at which the cache holds them."""
    model, read = tiny.model("v1", tiny.FUSED), []
    kernel = library()

    def noted(kind, sizes, pointers, strides, options):
        read.append((pointers[1], pointers[4], pointers[2]))
        kernel.diff_attention_step(kind, sizes, pointers, strides, options)

    monkeypatch.setattr(step, "library", lambda: SimpleNamespace(diff_attention_step=noted))
    cache = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(tiny.tokens(1, 4), past_key_values=cache)
        read.clear()
        model(tiny.tokens(1, 1), past_key_values=cache)
    width = model.config.head_dim // 2 * 4  # bytes of k in [k | k']
    held = [
        (x.keys.data_ptr(), x.keys.data_ptr() + width, x.values.data_ptr()) for x in cache.layers
    ]
    assert read == held


@torch.no_grad()
def test_another_model_runs_by_it():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model, ids = LlamaForCausalLM(config).eval(), tiny.tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    want = model(ids, attention_mask=mask).logits
    model.set_attn_implementation(tiny.FUSED)
    got = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **CLOSE)
    text = model.generate(ids, attention_mask=mask, max_new_tokens=5, pad_token_id=0)
    model.set_attn_implementation("eager")
    assert torch.equal(
        text, model.generate(ids, attention_mask=mask, max_new_tokens=5, pad_token_id=0)
    )


def test_dropout_and_soft_caps_are_refused():
    ids = tiny.tokens(1, 4)
    with pytest.raises(NotImplementedError, match="impl='fused' has no dropout"):
        tiny.model("v1", tiny.FUSED, attention_dropout=0.1).train()(ids)
    with pytest.raises(NotImplementedError, match="impl='fused' has no softcap"):
        tiny.model("v1", tiny.FUSED, attention_softcap=2.0)(ids)
