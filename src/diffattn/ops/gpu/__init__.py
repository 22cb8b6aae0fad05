"""Differential attention on GPUs, in Triton: one pass over the keys for both maps."""

from diffattn.ops.gpu.attention import (
    gpu_diff_attention,
    normed_diff_attention,
    packed_diff_attention,
)

__all__ = ["gpu_diff_attention", "normed_diff_attention", "packed_diff_attention"]
