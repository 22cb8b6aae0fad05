"""Which parameters get weight decay."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for AdamW: matrices with weight decay, all else without.

    Args:
        model: its parameters that require gradients are grouped.
        weight_decay: of the matrices.

    Returns:
        Groups with "params", "weight_decay" and "names". Without decay: lambda vectors and
        projections, norm gains and biases.

    Source: DIFF V1 trains lambda without weight decay (our choice where the paper is silent).
    """
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() >= 2 and "lambda" not in name
            (decayed if is_matrix else plain).append((name, parameter))
    return [
        {
            "params": [parameter for _, parameter in group],
            "names": [name for name, _ in group],
            "weight_decay": decay,
        }
        for group, decay in ((decayed, weight_decay), (plain, 0.0))
        if group
    ]
