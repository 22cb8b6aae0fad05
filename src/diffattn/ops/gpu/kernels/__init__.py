"""Triton kernels of differential attention: one pass over the keys for both maps.

Scores and log-sum-exps are in units of log 2, so that exp2 serves them. Upper-case arguments
after the sizes are known when a kernel is compiled; T, S, H, N, G, D, E as in
`diffattn.ops.attention`. Tensors that the operators allocate are contiguous, so their strides
follow from the sizes; inputs bring strides of (batch, time, heads), masks of (batch, heads, T, S).

By order, window and document a query sees an interval of keys. Blocks of keys that all rows of a
program see entirely run without a comparison; the others (EDGE) hide key by key and put zeros in
place of keys and values that no row of the program sees, whatever memory holds there.

Every sum is taken by one program in one order: no atomics. Addresses are a 64-bit base, moved
block by block, plus 32-bit offsets inside a block.
"""

from diffattn.ops.gpu.kernels.decode import join, split_forward
from diffattn.ops.gpu.kernels.forward import forward
from diffattn.ops.gpu.kernels.gradients import key_gradients, query_gradients, sums

__all__ = ["forward", "join", "key_gradients", "query_gradients", "split_forward", "sums"]
