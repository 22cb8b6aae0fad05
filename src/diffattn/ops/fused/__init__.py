"""Differential attention in one pass over complete rows, compiled for the machine it runs on."""

from diffattn.ops.fused.attention import fused_diff_attention, fused_softmax_attention
from diffattn.ops.fused.library import is_available
from diffattn.ops.fused.step import HeadScale, LamVectors, attention_step, can_step

__all__ = [
    "HeadScale",
    "LamVectors",
    "attention_step",
    "can_step",
    "fused_diff_attention",
    "fused_softmax_attention",
    "is_available",
]
