"""What the language model of each kind does behind each attention implementation."""

import tiny
import torch
from transformers import StaticCache

MODELS = {
    "softmax": {"attention": "softmax"},
    "v1": {"attention": "v1"},
    "v2": {"attention": "v2"},
    "grouped": {"attention": "grouped"},
    "grouped_latent": {"attention": "grouped_latent"},
    "mixed": {"attention": ["v1", "softmax", "v2"], "num_hidden_layers": 3},
}
# its name since transformers 5.24, and before
ENABLE = next(
    name
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    if hasattr(tiny.DiffTransformerForCausalLM, name)
)
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")


def _model(name, attn, **options):
    return tiny.model("v1", attn, **{**MODELS[name], **options})


def _logits(model, ids, **arguments):
    with torch.no_grad():
        return model(ids, use_cache=False, **arguments).logits


def _same(name, attn, arguments=None, **options):
    ids = tiny.tokens(2, 10)
    model = _model(name, attn, **options)
    eager = _model(name, "eager", **options)
    eager.load_state_dict(model.state_dict())
    got, want = (_logits(m, ids, **(arguments or {})) for m in (model, eager))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def _backward(name, attn):
    model = _model(name, attn)
    ids = tiny.tokens(2, 10)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def _checkpointing(name, attn):
    model = _model(name, attn).train()
    ids = tiny.tokens(2, 10)
    model(ids, labels=ids).loss.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    getattr(model, ENABLE)()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for p, w in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, w, rtol=0, atol=1e-5)


def _generate(name, attn, **options):
    model = _model(name, attn)
    ids = tiny.tokens(2, 5)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    got = model.generate(ids, **arguments, **options)
    want = _model(name, "eager").generate(ids, use_cache=False, **arguments, **options)
    assert torch.equal(got, want)


def _static(name, attn):
    model, ids = _model(name, attn), tiny.tokens(2, 10)
    cache = StaticCache(config=model.config, max_cache_len=17)
    with torch.no_grad():
        parts = [model(part, cache=cache, use_cache=True).logits for part in ids.split((6, 4), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), _logits(model, ids), rtol=0, atol=1e-4)


def _maps(name, attn):
    with torch.no_grad():
        maps = _model(name, attn)(tiny.tokens(2, 6), output_attentions=True).attentions
    assert all(m.shape[-2:] == (6, 6) for m in maps)


PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]]).expand(2, -1)

FEATURES = {
    "forward": _same,
    "left padding": lambda n, a: _same(n, a, {"attention_mask": PADDED}),
    "packed documents": lambda n, a: _same(n, a, {"position_ids": PACKED}),
    "sliding window": lambda n, a: _same(n, a, sliding_window=4),
    "QK-norm": lambda n, a: _same(n, a, qk_norm=True),
    "output gate": lambda n, a: _same(n, a, output_gate=True),
    "biases": lambda n, a: _same(n, a, attention_bias=True),
    "sink": lambda n, a: _same(n, a, attention_sink=True),
    "soft cap": lambda n, a: _same(n, a, attention_softcap=3.0),
    "training": _backward,
    "gradient checkpointing": _checkpointing,
    "generation": _generate,
    "beam search": lambda n, a: _generate(n, a, num_beams=3),
    "static cache": _static,
    "returned maps": _maps,
}


def cell(name, feature, attn):
    """ "yes", or the sentence of the refusal."""
    try:
        FEATURES[feature](name, attn)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]
    return "yes"
