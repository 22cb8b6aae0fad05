"""The steps that every attention layer shares: projections, positions, cache, their order."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from diffattn.nn.cache import KeyValueCache
from diffattn.ops import apply_rotary, rotary_angles

Rotation = tuple[Tensor, Tensor]


class AttentionLayer(nn.Module):
    """What the two layers share: projections, positions, cache, the order of the steps.

    `forward` attends by an operator of `diffattn.ops`. A model that calls another kernel runs
    the steps itself: `queries`, `keys`, `values`, `kernel_queries`, `kernel_keys`, the kernel,
    `combine`, `output`.
    """

    num_key_value_groups: int

    def __init__(
        self,
        hidden_size: int,
        *,
        query_heads: int,
        key_heads: int,
        value_heads: int,
        output_heads: int,
        head_dim: int,
        value_dim: int,
        context_size: int | None,
        bias: bool,
        causal: bool,
        window: int | None,
        rope_theta: float | None,
        dropout: float,
        impl: str,
    ) -> None:
        super().__init__()
        context_size = hidden_size if context_size is None else context_size
        self.head_dim, self.value_dim = head_dim, value_dim
        self.scaling = head_dim**-0.5
        self.causal, self.window, self.rope_theta = causal, window, rope_theta
        self.dropout, self.impl = dropout, impl
        self.q_proj = nn.Linear(hidden_size, query_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(context_size, key_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(context_size, value_heads * value_dim, bias=bias)
        self.o_proj = nn.Linear(output_heads * value_dim, hidden_size, bias=bias)

    def queries(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """All query heads [B, T, heads, D], rotated."""
        return self._rotated(self.q_proj(x), rotation)

    def keys(self, context: Tensor, rotation: Rotation | None) -> Tensor:
        """All key heads [B, S, heads, D], rotated."""
        return self._rotated(self.k_proj(context), rotation)

    def values(self, context: Tensor) -> Tensor:
        """Value heads [B, S, G, E]."""
        return self.v_proj(context).unflatten(-1, (-1, self.value_dim))

    def _rotated(self, projected: Tensor, rotation: Rotation | None) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.head_dim))
        return heads if rotation is None else apply_rotary(heads, *rotation)

    def _rotation(
        self, x: Tensor, context: Tensor | None, positions: Tensor | None, seen: int
    ) -> Rotation | None:
        if self.rope_theta is None:
            return None
        if context is not None:
            raise ValueError(
                "context: rotary positions are defined for self-attention; build a "
                "cross-attention layer with rope_theta=None"
            )
        if positions is None:
            positions = torch.arange(seen, seen + x.shape[1], device=x.device)
        precision = torch.promote_types(x.dtype, torch.float32)
        return rotary_angles(positions, self.head_dim, theta=self.rope_theta, dtype=precision)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attend from `x` to itself, to what `cache` holds, or to `context`.

        Args:
            x: [B, T, hidden_size] input.
            context: [B, S, context_size] other sequence for cross-attention; None means `x`.
            mask: bool (True = visible) or float, broadcastable to [B, heads, T, S].
            cache: keys and values of earlier steps; is extended by this one.
            positions: [B, T] or [T] rotary positions; None counts on from the cache.

        Returns:
            [B, T, hidden_size] in the dtype of `x`.

        Raises:
            ValueError: `context` is given to a causal layer, to one with rotary positions, or
                together with `cache`.
        """
        if context is not None and self.causal:
            raise ValueError("context: a causal layer attends to itself; build it causal=False")
        if context is not None and cache is not None:
            raise ValueError("cache: expected None with a context, whose keys do not grow")
        rotation = self._rotation(x, context, positions, 0 if cache is None else len(cache))
        source = x if context is None else context
        q, k, v = self.queries(x, rotation), self.keys(source, rotation), self.values(source)
        if cache is not None:
            k, v = cache.update(k, v)
        return self.output(self._attend(x, q, k, v, mask)).to(x.dtype)

    @abstractmethod
    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Head outputs [B, T, H, E] by an operator of `diffattn.ops`."""

    @abstractmethod
    def kernel_queries(self, q: Tensor) -> Tensor:
        """Queries [B, T, query heads, W] as one stock attention kernel takes them."""

    @abstractmethod
    def kernel_keys(self, k: Tensor) -> Tensor:
        """Keys [B, S, G, W] as one stock attention kernel takes them."""

    @abstractmethod
    def combine(self, x: Tensor, heads: Tensor) -> Tensor:
        """Head outputs [B, T, H, E] from the stock kernel's [B, T, query heads, E]."""

    @abstractmethod
    def combine_maps(self, x: Tensor, maps: Tensor) -> Tensor:
        """Attention maps [B, H, T, S] from the stock kernel's [B, query heads, T, S]."""

    def output(self, heads: Tensor) -> Tensor:
        """Join the heads [B, T, H, E] and project them to [B, T, hidden_size]."""
        return self.o_proj(heads.flatten(2))
