"""The activation of Motif's feed-forward layers."""

import torch
from torch import Tensor, nn

from diffattn.nn.checks import check_number
from diffattn.nn.fp32 import Fp32Module


class PolyNorm(Fp32Module):
    """A polynomial of normalised powers.

        y = w_0 x^3 / RMS(x^3) + w_1 x^2 / RMS(x^2) + w_2 x / RMS(x) + b

    Args:
        eps: added to each mean square.

    Parameters `weight` [3] and `bias` [1], fp32. Input and output have the same shape and dtype.

    Raises:
        ValueError: `eps` is negative or not finite.

    Source: Zhuo et al., arXiv 2411.03884, section 3; sizes as in Motif-2.6B.
    """

    start = 1.0 / 3.0

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        check_number("eps", eps, least=0)
        self.eps = eps
        self.weight = nn.Parameter(torch.full((3,), self.start, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        powers = (work**3, work**2, work)
        normed = [p * torch.rsqrt(p.square().mean(-1, keepdim=True) + self.eps) for p in powers]
        total = sum(w * p for w, p in zip(self.weight, normed, strict=True))
        return (total + self.bias).to(x.dtype)
