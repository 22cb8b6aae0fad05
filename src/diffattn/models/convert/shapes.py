"""The tensors that a checkpoint of our model must have."""

from collections.abc import Mapping

import torch
from torch import Tensor

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.models.convert.config_errors import reading_config
from diffattn.models.modeling_diff import DiffTransformerForCausalLM

State = Mapping[str, Tensor]


def our_shapes(config: DiffTransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of `DiffTransformerForCausalLM`, a tied output layer excepted.

    Raises:
        UserError: no model can be built from the configuration.
    """
    with reading_config(), torch.device("meta"):
        model = DiffTransformerForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def check_tensors(layout: str, state: State, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint whose layout is not what its label says.

    Args:
        layout: name for the message.
        state: the state dict.
        shapes: the shape of each tensor that it must have.

    Raises:
        UserError: a tensor is missing, extra or of another shape; the message names it.
    """
    optional = {"lm_head.weight"}
    if missing := sorted(set(shapes) - set(state)):
        raise UserError(f"checkpoint: {layout} lacks {missing[0]} ({len(missing)} missing)")
    if extra := sorted(set(state) - set(shapes) - optional):
        raise UserError(f"checkpoint: {layout} has no tensor {extra[0]} ({len(extra)} too many)")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise UserError(
                f"checkpoint: expected {name} of shape {shape}, got {tuple(state[name].shape)}"
            )
