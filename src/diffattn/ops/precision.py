"""Regions that autocast must leave alone."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def own_precision(tensor: Tensor) -> AbstractContextManager:
    """A context in which operations keep the dtypes they are given, autocast or not."""
    device = tensor.device.type
    # a device such as "meta" has none; where none is on, entering costs more than asking
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
