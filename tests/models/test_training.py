"""What training asks of the model: losses, gradients, checkpointing, autocast."""

import pytest
import tiny
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("kind", tiny.ONE_OF_EACH)
def test_loss_is_nats_of_the_next_token(kind):
    model, ids = tiny.model(kind), tiny.tokens(2, 9)
    labels = ids.clone()
    labels[0, 4:6] = -100
    out = model(ids, labels=labels)
    losses = F.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(out.loss, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", list(tiny.KINDS))
def test_every_parameter_gets_a_gradient(kind):
    model, ids = tiny.model(kind).train(), tiny.tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def enable_checkpointing(model, reentrant):
    """By the method's newer name where transformers has it."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})


@pytest.mark.parametrize(
    ("kind", "attn"),
    [
        *((kind, attn) for kind in tiny.ONE_OF_EACH for attn in ("sdpa", "eager")),
        *((kind, "sdpa") for kind in ("grouped_latent", "gated qk-norm", "mixed windows")),
        *tiny.EAGER_CASES,
    ],
)
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_gradient_checkpointing_gives_equal_gradients(kind, attn, reentrant):
    ids, found = tiny.tokens(2, 9), []
    for checkpointing in (False, True):
        model = tiny.model(kind, attn).train()
        calls = []
        attention = model.model.layers[0].self_attn
        attention.q_proj.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            enable_checkpointing(model, reentrant)
            model.enable_input_require_grads()
        model(ids, labels=ids).loss.backward()
        assert len(calls) == (2 if checkpointing else 1)  # the layer really ran again
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("keep", [1, 3, 12])
@torch.no_grad()
def test_logits_to_keep_as_a_number(keep):
    model, ids = tiny.model("v1"), tiny.tokens(2, 12)
    kept = model(ids, logits_to_keep=keep).logits
    assert kept.shape == (2, keep, tiny.VOCABULARY)
    torch.testing.assert_close(kept, model(ids).logits[:, -keep:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_logits_to_keep_zero_keeps_all():
    model, ids = tiny.model("v1"), tiny.tokens(2, 12)
    assert model(ids, logits_to_keep=0).logits.shape == (2, 12, tiny.VOCABULARY)


@torch.no_grad()
def test_embeddings_take_the_place_of_token_ids():
    model, ids = tiny.model("v2"), tiny.tokens(2, 6)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)


def test_ids_and_embeddings_together_or_neither_are_refused():
    model, ids = tiny.model("v1"), tiny.tokens(1, 4)
    with pytest.raises(ValueError, match=r"^input_ids: "):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match=r"^input_ids: "):
        model()


@torch.no_grad()
def test_a_plain_tuple_is_returned_when_asked_for():
    model, ids = tiny.model("v1"), tiny.tokens(1, 4)
    out = model(ids, return_dict=False, use_cache=False)
    assert isinstance(out, tuple)
    assert torch.equal(out[0], model(ids).logits)


@pytest.mark.parametrize("kind", tiny.ONE_OF_EACH)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_fp32_weights_in_bf16_autocast(kind, attn):
    model, ids = tiny.model(kind, attn).train(), tiny.tokens(2, 9)
    seen = {}
    attention = model.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda m, args: seen.update(o=args[0].dtype))
    if kind != "softmax":
        attention.lam.register_forward_hook(lambda m, args, out: seen.update(lam=out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert seen["o"] == torch.bfloat16
    assert seen.get("lam", torch.float32) == torch.float32
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )
    torch.testing.assert_close(loss.float(), model(ids, labels=ids).loss, rtol=0.02, atol=0)


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_attention_dropout_acts_in_training_alone(kind, attn):
    model, ids = tiny.model(kind, attn, attention_dropout=0.5), tiny.tokens(2, 9)
    assert torch.equal(model(ids).logits, model(ids).logits)
    torch.testing.assert_close(
        model(ids).logits, tiny.model(kind, attn)(ids).logits, rtol=0, atol=1e-6
    )
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_a_few_steps_lower_the_loss():
    model, ids = tiny.model("v1").train(), tiny.tokens(4, 16)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model(ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
