"""Small models of every kind, a kernel that notes what it is called with."""

import sys
from pathlib import Path

import pytest
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffattn.models.eager import eager_attention

sys.path.append(str(Path(__file__).parent))  # makes `import tiny` work


@pytest.fixture
def probe():
    """A registered attention function that notes its arguments; yields the notes."""
    notes = []

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        notes.append(
            {
                "query": query.shape,
                "key": key.shape,
                "value": value.shape,
                "scaling": scaling,
                "groups": module.num_key_value_groups,
                "is_causal": module.is_causal,
                "layer_idx": module.layer_idx,
                "kwargs": set(kwargs),
            }
        )
        out, _ = eager_attention(module, query, key, value, attention_mask, scaling, dropout)
        return out, None

    AttentionInterface.register("probe", attention)
    AttentionMaskInterface.register("probe", eager_mask)
    yield notes
    AttentionInterface._global_mapping.pop("probe")
    AttentionMaskInterface._global_mapping.pop("probe")
    assert "probe" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
