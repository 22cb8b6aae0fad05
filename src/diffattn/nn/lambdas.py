"""Modules that hold the parameters of lam, in fp32 whatever the model around them is cast to."""

from typing import Literal

import torch
from torch import Tensor, nn

from diffattn.nn.fp32 import Fp32Module
from diffattn.nn.sizes import DiffSizes
from diffattn.ops import exponential_lambda, sigmoid_lambda
from diffattn.ops.fused import LamVectors
from diffattn.ops.precision import own_precision

LambdaPer = Literal["layer", "head", "group"]
VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def heads_of_one_lambda(per: LambdaPer, sizes: DiffSizes) -> int:
    """Number of neighbouring signal heads that one lam serves.

    Args:
        per: "layer" (all H), "head" (1), or "group" (the H/N that share a noise head).
        sizes: head counts.

    Raises:
        ValueError: `per` is unknown.
    """
    shares = {"layer": sizes.num_diff_heads, "head": 1, "group": sizes.ratio}
    if per not in shares:
        raise ValueError(f"lam_per: expected 'layer', 'head' or 'group', got {per!r}")
    return shares[per]


class ExponentialLambda(Fp32Module):
    """lam of DIFF V1, from four learned vectors.

        lam = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + start

    Args:
        sizes: head counts and widths of the layer.
        start: lambda_init of the layer; kept in the buffer `start`, which is no parameter.
        std: standard deviation of the vectors' normal initialisation.
        per: what has a lam of its own: "layer", "head" or "group" (of signal heads that share a
            noise head).

    Parameters `lambda_q1`, `lambda_k1`, `lambda_q2`, `lambda_k2`: [D] per layer, [H, D] per head,
    [N, D] per group; fp32, to be trained without weight decay.

    Source: Ye et al., arXiv 2410.05258, Eq. 2; N(0, 0.1) and one lam a layer from the authors'
        code.
    """

    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter
    start: Tensor

    def __init__(
        self, sizes: DiffSizes, *, start: float, std: float = 0.1, per: LambdaPer = "layer"
    ) -> None:
        super().__init__()
        self.std, self.share = std, heads_of_one_lambda(per, sizes)
        rows = () if per == "layer" else (sizes.num_diff_heads // self.share,)
        for name in VECTORS:
            vector = torch.empty(*rows, sizes.head_dim, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(vector))
        self.register_constant("start", start)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew."""
        for vector in self.parameters():
            nn.init.normal_(vector, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        """The lam of the layer, 0-dimensional or [H] in fp32; `x` is not read."""
        lam = exponential_lambda(
            self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2, self.start
        )
        return lam if lam.dim() == 0 or self.share == 1 else lam.repeat_interleave(self.share)

    def vectors(self) -> LamVectors:
        """What lam is made of, for a kernel that makes it."""
        return LamVectors(
            self.lambda_q1,
            self.lambda_k1,
            self.lambda_q2,
            self.lambda_k2,
            self.constants["start"],
            self.share,
        )

    def extra_repr(self) -> str:
        """Shape of a vector and start value."""
        return f"{list(self.lambda_q1.shape)}, start={self.constants['start']:.6g}"


class SigmoidLambda(Fp32Module):
    """lam of DIFF V2: a value for each token, from the layer's input.

        lam = sigmoid(x W)

    Args:
        hidden_size: width of the layer's input x.
        sizes: head counts of the layer.
        per: what has a lam of its own in each token: "head", "group" (of signal heads that share
            a noise head) or "layer".

    `lambda_proj` is a linear map to H, N or 1 without bias, fp32, to be trained without weight
    decay.

    Source: Differential Transformer V2, Ye et al., January 2026; per group after Diff-TPA (Dragon).
    """

    def __init__(self, hidden_size: int, sizes: DiffSizes, *, per: LambdaPer = "head") -> None:
        super().__init__()
        self.share = heads_of_one_lambda(per, sizes)
        outputs = sizes.num_diff_heads // self.share
        self.lambda_proj = nn.Linear(hidden_size, outputs, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """The lam of each token and head, [B, T, H] in fp32, for x [B, T, hidden_size]."""
        # by the module's own forward, which engines of parallelism replace
        with own_precision(x):
            lam = sigmoid_lambda(self.lambda_proj(x.to(self.lambda_proj.weight.dtype)))
        return lam if self.share == 1 else lam.repeat_interleave(self.share, dim=-1)
