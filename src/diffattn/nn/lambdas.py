"""Modules that hold the parameters of lam, in fp32 whatever the model around them is cast to."""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffattn.ops import exponential_lambda, sigmoid_lambda
from diffattn.ops.precision import own_precision


class _Fp32Module(nn.Module):
    """Moves with its parent, but `.bfloat16()` and the like leave it at fp32 or better.

    So does a state dict in lower precision whose tensors are assigned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_widen)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrows = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(device=moved.device) if narrows else moved

        return super()._apply(keep_precision, recurse)


def _widen(module: nn.Module, incompatible_keys: Any) -> None:
    for parameter in module.parameters():
        if parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()


class ExponentialLambda(_Fp32Module):
    """lam of DIFF V1: one scalar a layer from four learned vectors.

        lam = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + start

    Args:
        head_dim: width of the vectors.
        start: lambda_init of the layer; kept in the buffer `start`, which is no parameter.
        std: standard deviation of the vectors' normal initialisation.

    Parameters `lambda_q1`, `lambda_k1`, `lambda_q2`, `lambda_k2`: [head_dim], fp32, to be
    trained without weight decay.

    Source: Ye et al., arXiv 2410.05258, Eq. 2; N(0, 0.1) from the authors' code.
    """

    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter
    start: Tensor

    def __init__(self, head_dim: int, *, start: float, std: float = 0.1) -> None:
        super().__init__()
        self.start_value, self.std = start, std
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(head_dim, dtype=torch.float32)))
        self.register_buffer("start", torch.empty((), dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew; set the start value."""
        for vector in self.parameters():
            nn.init.normal_(vector, std=self.std)
        nn.init.constant_(self.start, self.start_value)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # the start value is in no checkpoint: a module that was emptied on another device, or
        # built on none, gets it back here
        vectors = self.lambda_q1.detach()
        precision = torch.promote_types(vectors.dtype, torch.float32)
        self.start = torch.full_like(vectors[0], self.start_value, dtype=precision)

    def forward(self, x: Tensor) -> Tensor:
        """The lam of the layer as a 0-dimensional fp32 tensor; `x` is not read."""
        return exponential_lambda(
            self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2, self.start
        )

    def extra_repr(self) -> str:
        """Width and start value."""
        return f"{self.lambda_q1.shape[0]}, start={self.start_value:.6g}"


class SigmoidLambda(_Fp32Module):
    """lam of DIFF V2: one value for each token and head.

        lam = sigmoid(x W)

    Args:
        hidden_size: width of the layer's input x.
        num_diff_heads: number of output heads.

    `lambda_proj` is a linear map without bias, fp32, to be trained without weight decay.

    Source: Differential Transformer V2, Ye et al., January 2026.
    """

    def __init__(self, hidden_size: int, num_diff_heads: int) -> None:
        super().__init__()
        self.lambda_proj = nn.Linear(hidden_size, num_diff_heads, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """The lam of each token and head, [B, T, H] in fp32, for x [B, T, hidden_size]."""
        weight = self.lambda_proj.weight
        with own_precision(x):
            return sigmoid_lambda(F.linear(x.to(weight.dtype), weight))
