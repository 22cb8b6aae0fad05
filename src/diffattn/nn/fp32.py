"""Modules whose numbers stay in fp32 whatever the model around them is cast to.

They change slowly or are subtracted from near equals: an optimizer step of 1e-3 on a gain of 1 is
lost in bf16, and so is the difference of two exponentials near 1.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Fp32Module(nn.Module):
    """Moves with its parent, but `.bfloat16()` and the like leave it at fp32 or better.

    So does a state dict in lower precision whose tensors are assigned. Constants are buffers
    that stand in no checkpoint; as tensors, not Python numbers, they let layers that differ in
    them alone share one compiled graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[str, float] = {}
        self.register_load_state_dict_post_hook(_widen)

    def register_constant(self, name: str, value: float) -> None:
        """Add a 0-dimensional buffer that holds `value` in every precision and on every device."""
        self.constants[name] = value
        buffer = torch.full((), value, dtype=torch.float32)
        self.register_buffer(name, buffer, persistent=False)

    @property
    def is_bare(self) -> bool:
        """Whether calling this module is its own `forward` alone: no hook, no engine's forward."""
        return not (self._forward_hooks or self._forward_pre_hooks or "forward" in self.__dict__)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrows = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(device=moved.device) if narrows else moved

        super()._apply(keep_precision, recurse)
        for name in self.constants:
            self._restore(name, getattr(self, name))
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # a module that was emptied on another device, or built on none, gets its constants here
        for parameter in self.parameters(recurse=False):
            for name in self.constants:
                self._restore(name, parameter.detach())

    def _restore(self, name: str, like: Tensor) -> None:
        precision = torch.promote_types(like.dtype, torch.float32)
        value = self.constants[name]
        setattr(self, name, torch.full((), value, dtype=precision, device=like.device))


def _widen(module: nn.Module, incompatible_keys: Any) -> None:
    for parameter in module.parameters():
        if parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()
