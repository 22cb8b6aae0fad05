"""Language models with differential attention; importing registers them with the Auto classes."""

from diffattn.errors import needs_extra

with needs_extra("diffattn.models", "hf"):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from diffattn.models.configuration_diff import ATTENTION_KINDS, DiffTransformerConfig
from diffattn.models.modeling_diff import (
    DiffTransformerForCausalLM,
    DiffTransformerModel,
    DiffTransformerPreTrainedModel,
)

AutoConfig.register("diff_transformer", DiffTransformerConfig, exist_ok=True)
AutoModel.register(DiffTransformerConfig, DiffTransformerModel, exist_ok=True)
AutoModelForCausalLM.register(DiffTransformerConfig, DiffTransformerForCausalLM, exist_ok=True)

__all__ = [
    "ATTENTION_KINDS",
    "DiffTransformerConfig",
    "DiffTransformerForCausalLM",
    "DiffTransformerModel",
    "DiffTransformerPreTrainedModel",
]
