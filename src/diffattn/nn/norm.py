"""Root-mean-square normalisation, for blocks and for single heads."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Normalise the last axis by its root mean square.

        y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        width: size of the last axis.
        eps: added to the mean square; 1e-5 as in the authors' per-head norm.

    Input and output have the same shape and dtype; the statistics are taken in fp32 or better.

    Source: Zhang and Sennrich, arXiv 1910.07467, Eq. 4.
    Differs: torch's own module returns the weight's dtype under autocast; this one returns the
        input's.
    """

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., width]."""
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = work * torch.rsqrt(work.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        """Width and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
