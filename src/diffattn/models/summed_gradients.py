"""The parallel style of parameters that each process uses for its own heads alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.tensor_parallel import ParallelInterface, TensorParallelLayer

SUMMED_GRADIENTS = "diffattn_summed_gradients"


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:  # pyright: ignore
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SummedGradients(TensorParallelLayer):
    """Runs a module on its own parameters, with whole gradients for those that all processes hold.

    A parameter that is split is handed to `forward` as this process's part. One that every
    process holds in full is used for other heads in each, so its gradient is their sum.

    Differs: "replicated_with_grad_allreduce" of transformers sums `parameter.grad` after each
        backward pass, and so counts the earlier ones again where gradients accumulate (5.24).
    """

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: Any) -> Iterator[None]:
        """Put the tensors that `forward` shall read in the parameters' place."""
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            if hasattr(parameter, "to_local"):
                module._parameters[name] = parameter.to_local()  # pyright: ignore
            elif torch.is_grad_enabled() and parameter.requires_grad:
                module._parameters[name] = _SumGradient.apply(parameter, mesh.get_group())
        try:
            yield
        finally:
            module._parameters.update(own)


ParallelInterface.register(SUMMED_GRADIENTS, SummedGradients())  # pyright: ignore
