"""The differential extension of one layer's heads."""

import torch
from torch import Tensor, nn

from diffattn.dex.schedule import schedule_shares
from diffattn.nn.fp32 import Fp32Module


class DexExtension(Fp32Module):
    """Subtract a learned linear map of each selected head from it.

        O'_h = O_h - lam(t) O_h W_D,  h selected;  O'_h = O_h bitwise otherwise

    Args:
        heads: selected heads.
        num_heads: heads H of the layer.
        value_dim: width d_v of a head.
        start: lambda_init of the layer.
        ramp_steps: T of the schedule.
        pinned: lam stays at `start` and is not learned.
        sign: -1 subtracts, +1 adds.
        per_head: a matrix and a lambda_learn for each selected head.
        init_std: of W_D, in units of 1 / sqrt(d_v).

    Parameters in fp32: `weight` [1 or heads, d_v, d_v], `lambda_learn` [1 or heads] unless
    pinned. Input and output [..., H d_v] have the dtype of the model; lam W_D is formed in fp32.

    Source: Kong et al., arXiv 2505.16333, Eqs. 3 to 5.
    """

    shares: Tensor
    index: Tensor

    def __init__(
        self,
        heads: list[int],
        *,
        num_heads: int,
        value_dim: int,
        start: float,
        ramp_steps: int,
        pinned: bool = False,
        sign: int = -1,
        per_head: bool = False,
        init_std: float = 3**-0.5,
    ) -> None:
        super().__init__()
        self.heads, self.num_heads, self.value_dim = heads, num_heads, value_dim
        self.start, self.ramp_steps, self.pinned, self.sign = start, ramp_steps, pinned, sign
        matrices = len(heads) if per_head else 1
        size = (matrices, value_dim, value_dim)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        nn.init.normal_(self.weight, std=init_std * value_dim**-0.5)
        self.lambda_learn = None
        if not pinned:
            self.lambda_learn = nn.Parameter(torch.zeros(matrices, dtype=torch.float32))
        self.register_buffer("index", torch.tensor(heads), persistent=False)
        self.register_buffer("shares", torch.zeros(2), persistent=False)
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Move the schedule to t = `step` optimizer steps done."""
        fixed, learned = schedule_shares(step, start=self.start, ramp_steps=self.ramp_steps)
        with torch.no_grad():
            self.shares.copy_(torch.tensor([self.start, 0.0] if self.pinned else [fixed, learned]))

    def lam(self) -> Tensor:
        """The coefficient at step t, [1] or one for each selected head, fp32."""
        fixed, learned = self.shares.unbind()
        if self.lambda_learn is None:
            return fixed.reshape(1)
        return fixed + learned * self.lambda_learn

    def scaled_weight(self) -> Tensor:
        """The matrix that is added to the identity, [1 or heads, d_v, d_v]: -lam W_D."""
        return self.sign * self.lam()[:, None, None] * self.weight

    def forward(self, outputs: Tensor) -> Tensor:
        """Head outputs [..., H d_v] before the output projection."""
        heads = outputs.unflatten(-1, (self.num_heads, self.value_dim))
        change = self.change(heads.index_select(-2, self.index))
        return heads.index_add(-2, self.index, change.to(heads.dtype)).flatten(-2)

    def change(self, selected: Tensor) -> Tensor:
        """What is added to selected heads [..., heads, d_v]: -lam O W_D, in their dtype."""
        matrices = self.scaled_weight().to(selected.dtype)
        if matrices.shape[0] == 1:
            return selected @ matrices[0]
        return (selected.unsqueeze(-2) @ matrices).squeeze(-2)

    def extra_repr(self) -> str:
        """Selected heads and start value."""
        return f"{len(self.heads)} of {self.num_heads} heads, start={self.start:.6g}"
