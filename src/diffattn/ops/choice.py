"""Which implementation of the operators runs."""

import functools
import logging
from typing import Literal

import torch
from torch import Tensor

from diffattn.ops.fused import is_available
from diffattn.ops.plain import are_plain

Implementation = Literal["auto", "reference", "sdpa", "one_call", "blocked", "fused", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "sdpa", "one_call", "blocked", "fused")
"""those that run on a CPU"""
ON_GPUS: tuple[str, ...] = ("triton",)

_FEW_SCORES = 64 * 64
"""in a map; below, without a compiler, torch's kernel twice costs less than cutting into blocks"""

_logger = logging.getLogger(__name__)


def choose_implementation(
    impl: str, softcap: float | None, dropout: float, dropout_masks: str
) -> str:
    """The implementation that runs; layers ask when they are built, the operator at each call.

    Args:
        impl: a name, or "auto".
        softcap: of the scores.
        dropout: probability.
        dropout_masks: "shared" or "independent".

    Returns:
        One of `IMPLEMENTATIONS` or `ON_GPUS`.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: the named implementation cannot serve the other arguments.
    """
    names = IMPLEMENTATIONS + ON_GPUS
    if impl != "auto" and impl not in names:
        raise ValueError(f"impl: expected 'auto' or one of {names}, got {impl!r}")
    if dropout_masks not in ("shared", "independent"):
        raise ValueError(
            f"dropout_masks: expected 'shared' or 'independent', got {dropout_masks!r}"
        )
    shared_dropout = dropout > 0 and dropout_masks == "shared"
    if impl == "auto":
        return "reference" if shared_dropout or softcap is not None else "sdpa"
    if impl in ("blocked", "fused", "triton") and softcap is not None:
        raise NotImplementedError(f"impl={impl!r} has no softcap: ask for impl='reference'")
    if impl in ("blocked", "fused", "triton") and dropout > 0:
        raise NotImplementedError(
            f"impl={impl!r} has no dropout: ask for impl='sdpa' or 'reference'"
        )
    if impl != "reference" and shared_dropout:
        raise NotImplementedError(
            f"impl={impl!r} draws a dropout mask for each map: ask for "
            "dropout_masks='independent', or impl='reference'"
        )
    if impl != "reference" and softcap is not None:
        raise NotImplementedError(
            f"impl={impl!r} runs torch's kernel, which takes no softcap: ask for impl='reference'"
        )
    return impl


def fastest_implementation(
    q: Tensor, k: Tensor, *others: object, mask: Tensor | None, dropout: float
) -> str:
    """What "auto" runs where the definition itself is not needed.

    On a CPU the compiled kernel, or plain blocks where the machine has no compiler and the maps
    are not small; torch's kernel on other devices, in export, under the transforms of
    `torch.func`, for subclasses of tensors, with dropout and where a mask needs a gradient.

    Args:
        q: [B, T, H, D].
        k: [B, S, G, D].
        *others: the other tensors of the call.
        mask: of the call.
        dropout: of the call.

    Returns:
        "fused", "blocked" or "sdpa".
    """
    tensors = [t for t in (q, k, mask, *others) if isinstance(t, Tensor)]
    learned_mask = mask is not None and mask.requires_grad
    if q.device.type != "cpu" or dropout > 0 or learned_mask:
        return "sdpa"
    # compiled programs keep our operators whole, exported ones are read by other engines
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if not (compiled or are_plain(tensors)):
        return "sdpa"
    if _has_kernel():
        return "fused"
    return "blocked" if q.shape[1] * k.shape[1] > _FEW_SCORES else "sdpa"


def log_choice(operator: str, impl: str, device: torch.device) -> None:
    """Tell the log what "auto" has chosen, once for each choice."""
    if not torch.compiler.is_compiling():
        _log_choice(operator, impl, device.type)


def _has_kernel() -> bool:
    return is_available()


# what torch.compiler.assume_constant_result does, which imports the compiler
_has_kernel._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _log_choice(operator: str, impl: str, device: str) -> None:
    _logger.info("%s: impl='auto' runs %r on %s", operator, impl, device)
