"""Where code that torch cannot look into may run."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors are memory alone: no trace, no transform of `torch.func`, no subclass.

    Args:
        tensors: all that a call reads.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return all(type(tensor) in _PLAIN for tensor in tensors)
