"""The attention layers: softmax, and the differential layer with its presets.

Both classes offer the same steps, so a model that calls a kernel of its own differs in the class
alone.
"""

from typing import Any, Literal, Self

from torch import Tensor

from diffattn.nn.lambdas import ExponentialLambda, SigmoidLambda
from diffattn.nn.layer import AttentionLayer
from diffattn.nn.norm import RMSNorm
from diffattn.nn.sizes import DiffSizes, match_v1, match_v2
from diffattn.ops import (
    diff_attention,
    lambda_init,
    softmax_attention,
    split_stripes,
    stack_queries,
    subtract_maps,
    subtract_outputs,
)


class SoftmaxAttention(AttentionLayer):
    """Multi-head softmax attention, the baseline that the differential layer replaces.

        out = concat_h(softmax(q_h k_h^T s + M) v_h) W_O

    Args:
        hidden_size: width of input and output.
        num_heads: query heads; `num_key_value_heads` divides it.
        num_key_value_heads: key/value heads; None means `num_heads`.
        head_dim: width of a head; None means hidden_size / num_heads.
        context_size: width of the other sequence in cross-attention; None means `hidden_size`.
        bias: whether the projections have biases.
        causal: hide later positions.
        window: see positions less than this many steps away; None means all.
        rope_theta: base of rotary positions; None means no positions.
        dropout: probability of dropping an entry of the map in training.
        impl: implementation, as in `diffattn.ops.softmax_attention`.

    Raises:
        ValueError: heads do not divide.

    Source: Vaswani et al., arXiv 1706.03762, section 3.2.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        context_size: int | None = None,
        bias: bool = False,
        causal: bool = True,
        window: int | None = None,
        rope_theta: float | None = None,
        dropout: float = 0.0,
        impl: Literal["auto", "reference", "sdpa"] = "auto",
    ) -> None:
        groups = num_heads if num_key_value_heads is None else num_key_value_heads
        if head_dim is None:
            if num_heads < 1 or hidden_size % num_heads:
                raise ValueError(
                    f"num_heads: {num_heads} does not divide hidden_size = {hidden_size}"
                )
            head_dim = hidden_size // num_heads
        if groups < 1 or num_heads % groups:
            raise ValueError(
                f"num_key_value_heads: {groups} does not divide num_heads = {num_heads}"
            )
        super().__init__(
            hidden_size,
            query_heads=num_heads,
            key_heads=groups,
            value_heads=groups,
            output_heads=num_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            context_size=context_size,
            bias=bias,
            causal=causal,
            window=window,
            rope_theta=rope_theta,
            dropout=dropout,
            impl=impl,
        )
        self.num_key_value_groups = num_heads // groups

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return softmax_attention(
            q,
            k,
            v,
            causal=self.causal,
            window=self.window,
            mask=mask,
            scale=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            impl=self.impl,  # pyright: ignore[reportArgumentType] checked by the operator
        )

    def kernel_queries(self, q: Tensor) -> Tensor:
        """Queries as one attention kernel takes them: unchanged."""
        return q

    def kernel_keys(self, k: Tensor) -> Tensor:
        """Keys as one attention kernel takes them: unchanged."""
        return k

    def combine(self, x: Tensor, heads: Tensor) -> Tensor:
        """Head outputs from the kernel's outputs: unchanged."""
        return heads

    def combine_maps(self, x: Tensor, maps: Tensor) -> Tensor:
        """Attention maps from the kernel's maps: unchanged."""
        return maps


class DiffAttention(AttentionLayer):
    """Multi-head differential attention.

        head_h = (softmax(q_h k_h^T s + M) - lam softmax(q'_h k'_h^T s + M)) v_h
        out    = concat_h(f(head_h)) W_O,  f = (1 - lambda_init) RMSNorm with `head_norm`, else id

    The presets `v1`, `v2` and `grouped` compute the sizes from the Transformer to be matched.

    Args:
        hidden_size: width of input and output.
        sizes: head counts and widths.
        lam: "exponential" (one scalar a layer, V1) or "sigmoid" (each token and head, V2).
        layer_idx: index of the layer from 0; sets lambda_init where `lam` is "exponential".
        own_noise_key: whether the noise map has keys of its own (V1) or the signal's (V2).
        head_norm: per-head RMSNorm and the factor (1 - lambda_init).
        lambda_start: constant lambda_init in place of the depth schedule.
        lambda_std: standard deviation of the lambda vectors' initialisation.
        norm_eps: epsilon of the per-head norm.
        context_size: width of the other sequence in cross-attention; None means `hidden_size`.
        bias: whether the projections have biases.
        causal: hide later positions.
        window: see positions less than this many steps away; None means all.
        rope_theta: base of rotary positions, for signal and noise alike; None means none.
        dropout: probability of dropping an entry of the maps in training.
        dropout_masks: "shared" or "independent" masks of the two maps.
        impl: implementation, as in `diffattn.ops.diff_attention`.

    Parameters: `q_proj` with query heads in stripes of r signal heads and their noise head
    (adjacent pairs for r = 1), `k_proj` with (k, k') for each key group, `v_proj`, `o_proj`,
    `lam.lambda_q1` and so on or `lam.lambda_proj`, and `subln` with one gain for all heads.

    Raises:
        ValueError: sizes do not divide, or a pair would read two key groups.

    Example:
        >>> import torch
        >>> layer = DiffAttention.v1(256, match_heads=8, layer_idx=0)
        >>> layer(torch.randn(1, 5, 256)).shape
        torch.Size([1, 5, 256])

    Source: Ye et al., arXiv 2410.05258, Eqs. 1 to 3; Differential Transformer V2 (January 2026).
    Differs: the paper's norm has no gain; the authors' code has had one since 25 October 2024,
        and so has this.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        sizes: DiffSizes,
        lam: Literal["exponential", "sigmoid"],
        layer_idx: int,
        own_noise_key: bool,
        head_norm: bool,
        lambda_start: float | None = None,
        lambda_std: float = 0.1,
        norm_eps: float = 1e-5,
        context_size: int | None = None,
        bias: bool = False,
        causal: bool = True,
        window: int | None = None,
        rope_theta: float | None = None,
        dropout: float = 0.0,
        dropout_masks: Literal["shared", "independent"] = "shared",
        impl: Literal["auto", "reference", "sdpa", "one_call"] = "auto",
    ) -> None:
        super().__init__(
            hidden_size,
            query_heads=sizes.num_diff_heads + sizes.num_noise_heads,
            key_heads=sizes.num_key_value_heads * (2 if own_noise_key else 1),
            value_heads=sizes.num_key_value_heads,
            output_heads=sizes.num_diff_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_dim,
            context_size=context_size,
            bias=bias,
            causal=causal,
            window=window,
            rope_theta=rope_theta,
            dropout=dropout,
            impl=impl,
        )
        self.sizes, self.layer_idx = sizes, layer_idx
        self.own_noise_key, self.dropout_masks = own_noise_key, dropout_masks
        query_heads = sizes.num_diff_heads + sizes.num_noise_heads
        self.num_key_value_groups = query_heads // sizes.num_key_value_heads
        start = lambda_init(layer_idx) if lambda_start is None else lambda_start
        if lam == "exponential":
            self.lam = ExponentialLambda(sizes.head_dim, start=start, std=lambda_std)
        elif lam == "sigmoid":
            self.lam = SigmoidLambda(hidden_size, sizes.num_diff_heads)
        else:
            raise ValueError(f"lam: expected 'exponential' or 'sigmoid', got {lam!r}")
        self.subln = RMSNorm(sizes.value_dim, eps=norm_eps) if head_norm else None
        self.output_factor = 1.0 - start if head_norm else 1.0

    @classmethod
    def v1(
        cls,
        hidden_size: int,
        *,
        layer_idx: int,
        match_heads: int | None = None,
        match_key_value_heads: int | None = None,
        num_diff_heads: int | None = None,
        num_key_value_heads: int | None = None,
        **options: Any,
    ) -> Self:
        """DIFF V1 (arXiv 2410.05258): own noise keys, values of 2 D, one lam a layer, head norm.

        Args:
            hidden_size: width of input and output.
            layer_idx: index of the layer from 0.
            match_heads: heads N of the Transformer to match: N/2 pairs of its head width.
            match_key_value_heads: its key/value heads; None means N.
            num_diff_heads: number of pairs, instead of `match_heads`.
            num_key_value_heads: key/value heads, instead of `match_key_value_heads`.
            **options: keyword arguments of the class from `lambda_start` on.

        Raises:
            ValueError: heads do not divide.

        Warns:
            UserWarning: `num_diff_heads` narrows the heads of the matched Transformer.
        """
        return cls.grouped(
            hidden_size,
            ratio=1,
            layer_idx=layer_idx,
            match_heads=match_heads,
            match_key_value_heads=match_key_value_heads,
            num_diff_heads=num_diff_heads,
            num_key_value_heads=num_key_value_heads,
            **options,
        )

    @classmethod
    def v2(
        cls,
        hidden_size: int,
        *,
        match_heads: int,
        match_key_value_heads: int | None = None,
        head_dim: int | None = None,
        layer_idx: int = 0,
        **options: Any,
    ) -> Self:
        """DIFF V2 (January 2026): 2 N queries on the keys as they were, lam for each token.

        Args:
            hidden_size: width of input and output.
            match_heads: heads N of the Transformer to match: N output heads.
            match_key_value_heads: its key/value heads; None means N.
            head_dim: width of a head; None means hidden_size / N.
            layer_idx: index of the layer from 0; V2 does not depend on it.
            **options: keyword arguments of the class from `lambda_start` on.

        Raises:
            ValueError: heads do not divide.
        """
        sizes = match_v2(
            hidden_size,
            match_heads=match_heads,
            match_key_value_heads=match_key_value_heads,
            head_dim=head_dim,
        )
        return cls(
            hidden_size,
            sizes=sizes,
            lam="sigmoid",
            layer_idx=layer_idx,
            own_noise_key=False,
            head_norm=False,
            **options,
        )

    @classmethod
    def grouped(
        cls,
        hidden_size: int,
        *,
        ratio: int,
        layer_idx: int,
        match_heads: int | None = None,
        match_key_value_heads: int | None = None,
        num_diff_heads: int | None = None,
        num_key_value_heads: int | None = None,
        **options: Any,
    ) -> Self:
        """Grouped differential attention (arXiv 2510.06949): V1 with one noise head for r.

        Args:
            hidden_size: width of input and output.
            ratio: r, signal heads that share a noise head; 1 is V1.
            layer_idx: index of the layer from 0.
            match_heads: as in `v1`.
            match_key_value_heads: as in `v1`; None gives every noise head a group of its own.
            num_diff_heads: as in `v1`.
            num_key_value_heads: as in `v1`.
            **options: keyword arguments of the class from `lambda_start` on.

        Raises:
            ValueError: heads do not divide.
        """
        sizes = match_v1(
            hidden_size,
            match_heads=match_heads,
            match_key_value_heads=match_key_value_heads,
            num_diff_heads=num_diff_heads,
            num_key_value_heads=num_key_value_heads,
            ratio=ratio,
        )
        return cls(
            hidden_size,
            sizes=sizes,
            lam="exponential",
            layer_idx=layer_idx,
            own_noise_key=True,
            head_norm=True,
            **options,
        )

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, q_noise = split_stripes(q, self.sizes.ratio)
        k, k_noise = self._split_keys(k)
        heads = diff_attention(
            q,
            k,
            v,
            q_noise,
            k_noise,
            lam=self.lam(x),
            causal=self.causal,
            window=self.window,
            mask=mask,
            scale=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            dropout_masks=self.dropout_masks,  # pyright: ignore[reportArgumentType]
            impl=self.impl,  # pyright: ignore[reportArgumentType] checked by the operator
        )
        return self._normed(heads)

    def kernel_queries(self, q: Tensor) -> Tensor:
        """Queries as one stock attention kernel takes them, [B, T, H + N, W]."""
        signal, noise = split_stripes(q, self.sizes.ratio)
        return stack_queries(signal, noise, own_noise_key=self.own_noise_key)

    def kernel_keys(self, k: Tensor) -> Tensor:
        """Keys as one stock attention kernel takes them, [B, S, G, W], W = 2 D for [k | k']."""
        return k.unflatten(2, (-1, 2)).flatten(3) if self.own_noise_key else k

    def combine(self, x: Tensor, heads: Tensor) -> Tensor:
        """Head outputs [B, T, H, E] from the stock kernel's [B, T, H + N, E]; lam from `x`."""
        signal, noise = split_stripes(heads, self.sizes.ratio)
        return self._normed(subtract_outputs(signal, noise, self.lam(x)))

    def combine_maps(self, x: Tensor, maps: Tensor) -> Tensor:
        """Differential maps [B, H, T, S] from the stock kernel's [B, H + N, T, S]."""
        signal, noise = split_stripes(maps.transpose(1, 2), self.sizes.ratio)
        return subtract_maps(signal.transpose(1, 2), noise.transpose(1, 2), self.lam(x))

    def _split_keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.own_noise_key:
            return k, None
        signal, noise = k.unflatten(2, (-1, 2)).unbind(3)
        return signal, noise

    def _normed(self, heads: Tensor) -> Tensor:
        return heads if self.subln is None else self.subln(heads) * self.output_factor
