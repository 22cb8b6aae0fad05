"""The steps that every attention layer shares: projections, positions, cache, their order."""

from abc import abstractmethod
from typing import TypedDict

import torch
from torch import Tensor, nn

from diffattn.nn.cache import KeyValueCache
from diffattn.nn.checks import check_number, check_sequence
from diffattn.nn.norm import RMSNorm
from diffattn.ops import apply_rotary, rotary_angles
from diffattn.ops.arguments import check_numbers
from diffattn.ops.choice import Implementation
from diffattn.ops.fused import can_step

Rotation = tuple[Tensor, Tensor]


class LayerOptions(TypedDict, total=False):
    """Choices that every attention layer offers, all independent of one another."""

    context_size: int | None
    """width of the other sequence in cross-attention; None means `hidden_size`"""
    bias: bool
    """whether q, k and v projections have biases (default: no)"""
    output_bias: bool | None
    """whether the output projection has one; None means as `bias`"""
    causal: bool
    """hide later positions (default: yes)"""
    window: int | None
    """see positions less than this many steps away; None means all"""
    rope_theta: float | None
    """base of rotary positions, for signal and noise alike; None means no positions"""
    qk_norm: bool
    """RMSNorm over each query and key head, before its rotation (`q_norm`, `k_norm`)"""
    output_gate: bool
    """multiply the joined heads by sigmoid(x W_g) before the output projection (`g_proj`)"""
    softcap: float | None
    """c, bounds the scores: x becomes c tanh(x / c)"""
    sink: bool
    """a learned logit for each query head that takes weight and has no value (`sinks`)"""
    query_only: bool
    """no keys and values of its own: `forward` takes those of another layer"""
    norm_eps: float
    """epsilon of all norms in the layer (default 1e-5)"""
    qk_norm_eps: float | None
    """epsilon of `q_norm` and `k_norm`; None means `norm_eps`"""
    dropout: float
    """probability of dropping an entry of a map in training"""
    impl: str
    """implementation, as in `diffattn.ops.diff_attention`"""


class AttentionLayer(nn.Module):
    """What the two layers share: projections, positions, cache, the order of the steps.

    `forward` attends by an operator of `diffattn.ops`. A model that calls another kernel runs
    the steps itself: `queries`, `keys`, `values`, `kernel_queries`, `kernel_keys`,
    `kernel_values`, the kernel, `combine`, `output`.
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
        context_size: int | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        causal: bool = True,
        window: int | None = None,
        rope_theta: float | None = None,
        qk_norm: bool = False,
        output_gate: bool = False,
        softcap: float | None = None,
        sink: bool = False,
        query_only: bool = False,
        norm_eps: float = 1e-5,
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        check_numbers(window, softcap, dropout)
        check_number("norm_eps", norm_eps, least=0)
        if qk_norm_eps is not None:
            check_number("qk_norm_eps", qk_norm_eps, least=0)
        if rope_theta is not None:
            check_number("rope_theta", rope_theta, above=0)
            if head_dim % 2:
                raise ValueError(f"head_dim: rotary positions need an even width, got {head_dim}")
        if query_only and context_size is not None:
            raise ValueError(
                "context_size: expected None in a query_only layer, which has no keys of its own, "
                f"got {context_size}"
            )
        self.hidden_size = hidden_size
        self.context_size = hidden_size if context_size is None else context_size
        self.head_dim, self.value_dim = head_dim, value_dim
        self.scaling = head_dim**-0.5
        self.causal, self.window, self.rope_theta = causal, window, rope_theta
        self.softcap, self.query_only = softcap, query_only
        self.dropout, self.impl = dropout, impl
        self.q_proj = nn.Linear(hidden_size, query_heads * head_dim, bias=bias)
        if not query_only:
            self.k_proj = nn.Linear(self.context_size, key_heads * head_dim, bias=bias)
            self.v_proj = nn.Linear(self.context_size, value_heads * value_dim, bias=bias)
        joined = output_heads * value_dim
        self.g_proj = nn.Linear(hidden_size, joined, bias=False) if output_gate else None
        output_bias = bias if output_bias is None else output_bias
        self.o_proj = nn.Linear(joined, hidden_size, bias=output_bias)
        eps = norm_eps if qk_norm_eps is None else qk_norm_eps
        self.q_norm = RMSNorm(head_dim, eps=eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=eps) if qk_norm and not query_only else None
        self.sinks = nn.Parameter(torch.zeros(query_heads)) if sink else None

    def queries(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """All query heads [B, T, heads, D], normed and rotated."""
        return self._heads(self.q_proj(x), self.q_norm, rotation)

    def keys(self, context: Tensor, rotation: Rotation | None) -> Tensor:
        """All key heads [B, S, heads, D], normed and rotated."""
        return self._heads(self.k_proj(context), self.k_norm, rotation)

    def values(self, context: Tensor) -> Tensor:
        """Value heads [B, S, G, E]."""
        return self.v_proj(context).unflatten(-1, (-1, self.value_dim))

    def key_values(
        self, context: Tensor, *, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values for another layer that is `query_only` and has the same sizes.

        Args:
            context: [B, S, hidden_size or context_size] input of this layer.
            positions: [B, S] or [S] rotary positions; None counts from 0.

        Returns:
            Keys [B, S, heads, D] and values [B, S, G, E].

        Raises:
            ValueError: this layer is `query_only` itself, or `context` has another shape.
        """
        if self.query_only:
            raise ValueError(
                "key_values: this layer is query_only; call the layer whose keys it reads"
            )
        check_sequence("context", context, *self._context_width())
        rotation = self._rotation(context, positions, 0)
        return self.keys(context, rotation), self.values(context)

    def _heads(self, projected: Tensor, norm: RMSNorm | None, rotation: Rotation | None) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.head_dim))
        heads = heads if norm is None else norm(heads)
        return heads if rotation is None else apply_rotary(heads, *rotation)

    def _rotation(self, x: Tensor, positions: Tensor | None, seen: int) -> Rotation | None:
        if self.rope_theta is None:
            return None
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
        key_values: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend from `x` to itself, to what `cache` holds, to `context` or to `key_values`.

        Args:
            x: [B, T, hidden_size] input.
            context: [B, S, context_size] other sequence for cross-attention; None means `x`.
            mask: bool (True = visible) or float, broadcastable to [B, heads, T, S].
            cache: keys and values of earlier steps; is extended by this one.
            positions: [B, T] or [T] rotary positions of `x`; None counts on from the cache, or
                puts the last query at the last of `key_values`.
            key_values: keys and values from another layer's `key_values`, or from its cache;
                for a layer that is `query_only`.

        Returns:
            [B, T, hidden_size] in the dtype of `x`.

        Raises:
            ValueError: `x` or `context` is no [B, T, width] of the layer's width.
            ValueError: `context` is given to a causal layer, to one with rotary positions, or
                together with `cache`; `key_values` is given to a layer with keys of its own, or
                missing from one without.
        """
        check_sequence("x", x, "hidden_size", self.hidden_size)
        self._check_sources(context, cache, key_values)
        if key_values is not None:
            k, v = key_values
            q = self.queries(x, self._rotation(x, positions, k.shape[1] - x.shape[1]))
            return self._joined(x, q, k, v, mask)
        rotation = self._rotation(x, positions, 0 if cache is None else len(cache))
        source = x if context is None else context
        q, k, v = self.queries(x, rotation), self.keys(source, rotation), self.values(source)
        if cache is not None:
            k, v = cache.joined(k, v)
        output = self._joined(x, q, k, v, mask)
        if cache is not None:  # last, so that a refused call leaves the cache as it was
            cache.keys, cache.values = k, v
        return output

    def _check_sources(
        self,
        context: Tensor | None,
        cache: KeyValueCache | None,
        key_values: tuple[Tensor, Tensor] | None,
    ) -> None:
        if self.query_only != (key_values is not None):
            raise ValueError(
                "key_values: expected those of another layer, for this one is query_only"
                if self.query_only
                else "key_values: this layer has keys of its own; build it query_only=True"
            )
        if self.query_only and (context is not None or cache is not None):
            name = "cache" if context is None else "context"
            raise ValueError(f"{name}: expected None in a query_only layer; give key_values")
        if context is None:
            if self.context_size != self.hidden_size:
                raise ValueError(
                    f"context: expected [B, S, context_size] = [B, S, {self.context_size}], for "
                    "keys of that width, got None"
                )
            return
        if self.causal:
            raise ValueError("context: a causal layer attends to itself; build it causal=False")
        if cache is not None:
            raise ValueError("cache: expected None with a context, whose keys do not grow")
        if self.rope_theta is not None:
            raise ValueError(
                "context: rotary positions are defined for self-attention; build a "
                "cross-attention layer with rope_theta=None"
            )
        check_sequence("context", context, *self._context_width())

    def _context_width(self) -> tuple[str, int]:
        own = self.context_size == self.hidden_size
        return "hidden_size" if own else "context_size", self.context_size

    def _joined(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.output(x, self._attend(x, q, k, v, mask)).to(x.dtype)

    @abstractmethod
    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Head outputs [B, T, H, E] by an operator of `diffattn.ops`."""

    @abstractmethod
    def attend_stacked(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        causal: bool,
        impl: Implementation,
    ) -> Tensor:
        """Head outputs by an operator of `diffattn.ops`, from keys and values such as caches hold.

        Args:
            x: [B, T, hidden_size] input, which lam may depend on.
            q: [B, T, query heads, D] from `queries`.
            k: [B, S, G, W] as `kernel_keys` gives them; they are read where they lie.
            v: [B, S, G, E or W] as `kernel_values` gives them.
            mask: bool or additive, broadcastable to [B, H, T, S]; the layer's window is in it.
            causal: as in `diffattn.ops.diff_attention`.
            impl: as there.

        Returns:
            [B, T, H, E] in the dtype of `q`.
        """

    def _is_step(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, impl: str, *given: Tensor
    ) -> bool:
        """Whether the compiled kernel takes a stacked call whole, what `given` holds included."""
        named = impl == "fused" and self.softcap is None and not (self.training and self.dropout)
        for_all_heads = mask is None or (
            (mask.dtype == torch.bool or mask.is_floating_point())
            and (mask.dim() < 3 or mask.shape[-3] == 1)
        )
        sinks = () if self.sinks is None else (self.sinks,)
        return named and for_all_heads and can_step(q, k, v, mask, *sinks, *given)

    @abstractmethod
    def kernel_queries(self, q: Tensor) -> Tensor:
        """Queries [B, T, query heads, W] as one stock attention kernel takes them."""

    @abstractmethod
    def kernel_keys(self, k: Tensor) -> Tensor:
        """Keys [B, S, G, W] as one stock attention kernel takes them."""

    @abstractmethod
    def kernel_values(self, v: Tensor) -> Tensor:
        """Values [B, S, G, E or W] as one stock attention kernel takes them."""

    @abstractmethod
    def combine(self, x: Tensor, heads: Tensor) -> Tensor:
        """Head outputs [B, T, H, E] from the stock kernel's [B, T, query heads, E or W]."""

    @abstractmethod
    def combine_maps(self, x: Tensor, maps: Tensor) -> Tensor:
        """Attention maps [B, H, T, S] from the stock kernel's [B, query heads, T, S]."""

    def output(self, x: Tensor, heads: Tensor) -> Tensor:
        """Join the heads [B, T, H, E], gate them by `x`, project them to [B, T, hidden_size]."""
        joined = heads.flatten(2)
        if self.g_proj is not None:
            joined = joined * self.g_proj(x).sigmoid().to(joined.dtype)
        return self.o_proj(joined)
