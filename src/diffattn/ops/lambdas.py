"""The coefficient lam of the noise map, in its published forms."""

import math

import torch
from torch import Tensor


def lambda_init(layer_idx: int, *, offset: int = 0) -> float:
    """Depth-dependent start value of lam.

        lambda_init(l) = 0.8 - 0.6 exp(-0.3 (l + offset))

    Args:
        layer_idx: index l of the layer, counted from 0.
        offset: added to l; 0 for the authors' code, -1 for Motif, +1 for Dragon checkpoints.

    Returns:
        The start value; 0.2 for layer 0, towards 0.8 with depth.

    Raises:
        ValueError: `layer_idx` is negative.

    Example:
        >>> round(lambda_init(0), 6), round(lambda_init(1), 6)
        (0.2, 0.355509)

    Source: Ye et al., arXiv 2410.05258, section 2.1.
    Differs: the paper counts layers from 1 and writes exp(-0.3 (l - 1)).
    """
    if layer_idx < 0:
        raise ValueError(f"layer_idx: expected an index from 0, got {layer_idx}")
    return 0.8 - 0.6 * math.exp(-0.3 * (layer_idx + offset))


def exponential_lambda(
    lambda_q1: Tensor,
    lambda_k1: Tensor,
    lambda_q2: Tensor,
    lambda_k2: Tensor,
    start: Tensor | float,
) -> Tensor:
    """The lam of DIFF V1, reparametrised through exponentials.

        lam = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + start

    Args:
        lambda_q1: [D] learned vector, or [n, D] for n coefficients.
        lambda_k1: the same shape.
        lambda_q2: the same shape.
        lambda_k2: the same shape.
        start: the constant lambda_init(layer_idx).

    Returns:
        A 0-dimensional tensor, or [n], in fp32 (fp64 for fp64 vectors). Both exponentials lie
        near 1, so their difference is taken in fp32 even when the vectors are bf16 or autocast is
        on.

    Source: Ye et al., arXiv 2410.05258, Eq. 2.
    Differs: the authors' code casts lam to the activations' dtype; here it stays fp32.
    """
    work = torch.promote_types(lambda_q1.dtype, torch.float32)
    q1, k1, q2, k2 = (t.to(work) for t in (lambda_q1, lambda_k1, lambda_q2, lambda_k2))
    return (q1 * k1).sum(-1).exp() - (q2 * k2).sum(-1).exp() + start


def sigmoid_lambda(logits: Tensor) -> Tensor:
    """The lam of DIFF V2, one value for each token and head.

        lam = sigmoid(x W)

    Args:
        logits: [B, T, H] projection x W of the layer's input.

    Returns:
        [B, T, H] in fp32 (fp64 for fp64 logits), each in (0, 1).

    Source: Differential Transformer V2, Ye et al., January 2026.
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
