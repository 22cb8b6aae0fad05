"""Root-mean-square normalisation, for blocks and for single heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffattn.nn.checks import check_number
from diffattn.nn.fp32 import Fp32Module
from diffattn.ops.fused import HeadScale


class RMSNorm(Fp32Module):
    """Normalise the last axis by its root mean square.

        y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        width: size of the last axis.
        eps: added to the mean square; 1e-5 as in the authors' per-head norm.

    Input and output have the same shape and dtype; the statistics are taken in fp32 or better.
    `weight` [width] stays fp32 in models of lower precision.

    Raises:
        ValueError: `eps` is negative or not finite.

    Source: Zhang and Sennrich, arXiv 1910.07467, Eq. 4.
    Differs: torch's own module returns the weight's dtype under autocast; this one returns the
        input's.
    """

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        check_number("eps", eps, least=0)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., width]."""
        return self._scaled(x, self.weight)

    def _scaled(self, x: Tensor, gain: Tensor) -> Tensor:
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(work, gain.shape, gain.to(work.dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Width and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class HeadNorm(RMSNorm):
    """Norm of each differential head, with the fixed factor behind it.

        y = (1 - lambda_init) RMSNorm(x)

    Args:
        width: value width E of a head; one gain serves all heads of the layer.
        lambda_init: start value of lam in this layer.
        eps: added to the mean square.

    Source: Ye et al., arXiv 2410.05258, Eq. 3 and section 2.1.
    """

    factor: Tensor

    def __init__(self, width: int, *, lambda_init: float, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)
        self.register_constant("factor", 1.0 - lambda_init)

    def scale(self) -> HeadScale:
        """What the norm is made of, for a kernel that takes it."""
        return HeadScale(self.weight, self.constants["factor"], self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise heads [..., E]."""
        return self._scaled(x, self.weight * self.factor)
