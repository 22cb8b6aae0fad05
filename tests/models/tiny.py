"""Models small enough for every test, with weights large enough to tell right from wrong."""

import pytest
import torch

from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM
from diffattn.models.modeling_diff import _CACHE_FIELD
from diffattn.ops.fused import library

KINDS = {
    "softmax": {"attention": "softmax"},
    "softmax-gqa": {"attention": "softmax", "match_key_value_heads": 4},
    "v1": {"attention": "v1"},
    "v1-gqa": {"attention": "v1", "match_key_value_heads": 4},
    "v2": {"attention": "v2"},
    "v2-gqa": {"attention": "v2", "match_key_value_heads": 4},
    "grouped": {"attention": "grouped"},
    "grouped-gqa": {"attention": "grouped", "match_key_value_heads": 2},
    "mixed": {"attention": ["v1", "softmax", "v2", "grouped"], "num_hidden_layers": 4},
    "mixed-gqa": {
        "attention": ["softmax", "v1", "v2"],
        "num_hidden_layers": 3,
        "match_key_value_heads": 4,
    },
    "grouped_latent": {"attention": "grouped_latent"},
    "v1 sliding": {"attention": "v1", "sliding_window": 4},
    "mixed windows": {
        "attention": ["v1", "softmax", "v2", "grouped"],
        "num_hidden_layers": 4,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gated qk-norm": {
        "attention": "grouped",
        "qk_norm": True,
        "output_gate": True,
        "lam_per": "group",
    },
}
# options that torch's kernel does not take
EAGER_KINDS = {
    "soft cap": {"attention": "v1", "attention_softcap": 2.0},
    "sinks": {"attention": "v2", "attention_sink": True},
}
# every kind under every attention name that serves it
EAGER_CASES = [(kind, "eager") for kind in EAGER_KINDS]
FUSED = "diffattn_fused"
NEEDS_COMPILER = pytest.mark.skipif(
    library.compiler() is None, reason="'diffattn_fused' needs a C++ compiler: g++, or CXX"
)
FUSED_CASES = [pytest.param(kind, FUSED, marks=NEEDS_COMPILER) for kind in (*KINDS, "sinks")]
CASES = [
    *((kind, attn) for kind in KINDS for attn in ("eager", "sdpa")),
    *EAGER_CASES,
    *FUSED_CASES,
]
DIFFERENTIAL = ["v1", "v1-gqa", "v2", "v2-gqa", "grouped", "grouped-gqa", "mixed"]
ONE_OF_EACH = ["softmax", "v1", "v2", "grouped", "mixed"]
VOCABULARY = 61


def config(kind="v1", **options):
    """A configuration of width 64 and 8 heads to be matched."""
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "match_heads": 8,
        "intermediate_size": 96,
        "initializer_range": 0.1,
    }
    chosen = {**KINDS, **EAGER_KINDS}[kind]
    return DiffTransformerConfig(**{**base, **chosen, **options})


def model(kind="v1", attn="sdpa", **options):
    """A causal language model in evaluation mode, with distinct gains and sinks."""
    torch.manual_seed(1)
    built = DiffTransformerForCausalLM._from_config(
        config(kind, **options), attn_implementation=attn
    )
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith(("norm.weight", "subln.weight")):
                parameter.uniform_(0.5, 1.5)
            if name.endswith("sinks"):
                parameter.normal_()
    return built.eval()


def tokens(batch=2, length=12, seed=3):
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def writer(kind="v1", attn="sdpa", **options):
    """A model whose greedy text does not repeat one token."""
    return model(kind, attn, **{"tie_word_embeddings": False, "initializer_range": 0.2, **options})


def padded(prompts, width, side="left"):
    """Token ids and mask [rows, width] of prompts of different lengths."""
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return ids, mask


def cached_logits(model, ids, steps, cache=None, **options):
    """Logits of a run in steps with the cache handed from each to the next."""
    parts = []
    for chunk in ids.split(steps, dim=1):
        out = model(chunk, cache=cache, use_cache=True, **options)
        cache = getattr(out, _CACHE_FIELD)
        parts.append(out.logits)
    assert cache.get_seq_length() == ids.shape[1]
    return torch.cat(parts, dim=1)
