"""Random operands of differential attention, drawn from a seed of their own."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one call: batch, lengths, heads and widths."""

    B: int = 1
    T: int = 5
    S: int = 5
    H: int = 2
    N: int = 2
    G: int = 2
    D: int = 4
    E: int = 6
    own_key: bool = True
    seed: int = 0

    def __str__(self):
        kind = "" if self.own_key else "-v2"
        return f"B{self.B}-T{self.T}-S{self.S}-H{self.H}-N{self.N}-G{self.G}-E{self.E}{kind}"

    def draw(self, dtype=torch.float64, requires_grad=False):
        """q, k, v, q_noise and k_noise (None without own noise keys)."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.B, self.T, self.H, self.D),
            (self.B, self.S, self.G, self.D),
            (self.B, self.S, self.G, self.E),
            (self.B, self.T, self.N, self.D),
            (self.B, self.S, self.G, self.D),
        )
        tensors = [
            torch.randn(shape, generator=generator, dtype=torch.float64)
            .to(dtype)
            .requires_grad_(requires_grad)
            for shape in shapes
        ]
        return tensors if self.own_key else [*tensors[:4], None]

    def lam(self, kind, dtype=torch.float64):
        """The coefficient as a number, a 0-dimensional tensor, one a head or one a token."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        if kind == "number":
            return 0.37
        shape = {"scalar": (), "head": (self.H,), "token": (self.B, self.T, self.H)}[kind]
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    def bool_mask(self, shape=None, share=0.4):
        """A random bool mask, True = visible."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        shape = (self.B, self.H, self.T, self.S) if shape is None else shape
        return torch.rand(shape, generator=generator) > share


@st.composite
def geometries(draw, *, square=False, max_length=6):
    """Small geometries of every kind: grouped keys, shared noise heads, unequal lengths."""
    groups, per_group, ratio = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
    )
    length = draw(st.integers(1, max_length))
    return Geometry(
        B=draw(st.integers(1, 2)),
        T=length,
        S=length if square else draw(st.integers(1, max_length)),
        H=groups * per_group * ratio,
        N=groups * per_group,
        G=groups,
        D=draw(st.integers(1, 4)),
        E=draw(st.integers(1, 5)),
        own_key=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )
