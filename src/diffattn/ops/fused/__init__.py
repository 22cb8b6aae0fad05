"""Differential attention in one pass over complete rows, compiled for the machine it runs on."""

from diffattn.ops.fused.attention import fused_diff_attention, fused_softmax_attention
from diffattn.ops.fused.library import is_available

__all__ = ["fused_diff_attention", "fused_softmax_attention", "is_available"]
