"""The coefficient lam that each layer uses on given text."""

from typing import Any

import torch
from torch import Tensor, nn

from diffattn.nn import DiffAttention


@torch.no_grad()
def lam_by_layer(model: Any, input_ids: Tensor) -> list[float | None]:
    """Mean lam of each attention layer over tokens and heads.

    Args:
        model: a causal language model of Hugging Face's interface, on its device.
        input_ids: [B, T] tokens to run it on.

    Returns:
        One number for each layer, None for a softmax layer; empty for a model without any
        differential layer.
    """
    layers = [layer.self_attn for layer in model.model.layers]
    means: dict[int, float] = {}

    def keep(index: int) -> Any:
        def hook(module: nn.Module, args: Any, lam: Tensor) -> None:
            means[index] = float(lam.mean())

        return hook

    handles = [
        layer.lam.register_forward_hook(keep(index))
        for index, layer in enumerate(layers)
        if isinstance(layer, DiffAttention)
    ]
    if not handles:
        return []
    was_training = model.training
    model.eval()
    model(input_ids=input_ids.to(model.device), use_cache=False, logits_to_keep=1)
    model.train(was_training)
    for handle in handles:
        handle.remove()
    return [means.get(index) for index in range(len(layers))]
