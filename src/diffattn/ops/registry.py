"""Own operators of torch: autograd, compile and export know them by name and keep them whole.

`torch.library.custom_op` does the same, but its calls import torch's compiler, which takes seconds
and packages that torch does not ask for.
"""

from collections.abc import Callable
from typing import Any

import torch

_NAMESPACE = "diffattn"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


def operator(
    name: str, run: Callable[..., Any], *, device: str | None, shapes: Callable[..., Any]
) -> Any:
    """Register an operator.

    Args:
        name: in torch.ops.diffattn.
        run: computes it on tensors of memory; its annotations become the operator's signature, it
            changes no argument and returns none.
        device: on which it runs, "cpu"; None means every one.
        shapes: takes the same arguments and returns empty tensors of the result's shapes.

    Returns:
        The operator, to be called as `run` is.
    """
    schema = torch.library.infer_schema(run, mutates_args=())
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd" if device is None else device.upper())
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def differentiate(name: str, rule: Callable[..., Any], keep: Callable[..., None]) -> None:
    """Register the rule of an operator's gradients.

    Args:
        name: of the operator.
        rule: takes the context and the gradients of the outputs, returns those of the inputs.
        keep: takes the context, the inputs and the output.
    """
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", rule, setup_context=keep, lib=_LIBRARY)
