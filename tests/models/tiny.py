"""Models small enough for every test, with weights large enough to tell right from wrong."""

import torch

from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM

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
}
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
    return DiffTransformerConfig(**{**base, **KINDS[kind], **options})


def model(kind="v1", attn="sdpa", **options):
    """A causal language model in evaluation mode, with distinct gains in every norm."""
    torch.manual_seed(1)
    built = DiffTransformerForCausalLM._from_config(
        config(kind, **options), attn_implementation=attn
    )
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith(("norm.weight", "subln.weight")):
                parameter.uniform_(0.5, 1.5)
    return built.eval()


def tokens(batch=2, length=12, seed=3):
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)
