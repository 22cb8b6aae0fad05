"""Starting weights that arms share wherever names and shapes agree."""

import hashlib
from typing import Any

import torch


def draw_start(model: Any, seed: int) -> None:
    """Initialise a model so that a tensor depends on the seed, its module's name and its shape.

    Two models of different attention then start from equal tensors wherever these have the same
    name and shape: embeddings, norms, SwiGLU, and the projections that agree.

    Args:
        model: a `PreTrainedModel`; its own initialisation rule is used.
        seed: of the draw.
    """
    drawn: set[int] = set()
    for name, module in model.named_modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if own - drawn:  # a tied output layer keeps what the embedding drew
            drawn |= own
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False
            model._init_weights(module)
