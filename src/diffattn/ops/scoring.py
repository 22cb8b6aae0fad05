"""What decides the weights of a softmax map beside queries and keys; the same for both maps."""

from typing import NamedTuple

from torch import Tensor


class Scoring(NamedTuple):
    """The part of a call that signal and noise map share; see `diff_attention`."""

    causal: bool = False
    window: int | None = None
    mask: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def factor(self, width: int) -> float:
        """The scale s of scores of queries of this width."""
        return width**-0.5 if self.scale is None else self.scale
