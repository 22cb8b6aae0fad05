"""The attention layers: softmax, and the differential layer with its presets.

Both classes offer the same steps, so a model that calls a kernel of its own differs in the class
alone.
"""

from typing import Any, Literal, Self, Unpack

import torch.nn.functional as F
from torch import Tensor

from diffattn.nn.checks import check_number, check_options
from diffattn.nn.lambdas import ExponentialLambda, LambdaPer, SigmoidLambda
from diffattn.nn.layer import AttentionLayer, LayerOptions
from diffattn.nn.norm import HeadNorm
from diffattn.nn.sizes import DiffSizes, match_softmax, match_v1, match_v2
from diffattn.ops import (
    diff_attention,
    lambda_init,
    softmax_attention,
    split_stripes,
    stack_queries,
    subtract_maps,
    subtract_outputs,
)
from diffattn.ops.choice import Implementation, choose_implementation
from diffattn.ops.fused import attention_step
from diffattn.ops.scoring import Scoring


class SoftmaxAttention(AttentionLayer):
    """Multi-head softmax attention, the baseline that the differential layer replaces.

        out = concat_h(softmax(q_h k_h^T s + M) v_h) W_O

    Args:
        hidden_size: width of input and output.
        num_heads: query heads; `num_key_value_heads` divides it.
        num_key_value_heads: key/value heads; None means `num_heads`.
        head_dim: width of a head; None means hidden_size / num_heads.
        **options: see `LayerOptions`.

    Raises:
        ValueError: heads do not divide, or an option has no meaning.
        TypeError: an option is unknown.

    Source: Vaswani et al., arXiv 1706.03762, section 3.2.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        check_options(type(self).__name__, options, LayerOptions.__optional_keys__)
        groups, head_dim = match_softmax(
            hidden_size,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
        )
        super().__init__(
            hidden_size,
            query_heads=num_heads,
            key_heads=groups,
            value_heads=groups,
            output_heads=num_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            **options,
        )
        self.num_key_value_groups = num_heads // groups
        if self.impl in ("one_call", "triton"):
            raise ValueError(
                "impl: expected 'auto', 'reference', 'sdpa', 'blocked' or 'fused', got "
                f"{self.impl!r}"
            )
        choose_implementation(self.impl, self.softcap, self.dropout, "independent")

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self._softmax(q, k, v, mask, self.causal, self.window, self.impl)

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
        """Head outputs [B, T, H, E]; the arguments are those of `AttentionLayer.attend_stacked`."""
        if self._is_step(q, k, v, mask, impl):
            return attention_step(
                q,
                k,
                v,
                Scoring(causal, None, mask, self.scaling),
                ratio=0,
                own_noise_key=False,
                value_dim=self.value_dim,
                sinks=self.sinks,
            )
        return self._softmax(q, k, v, mask, causal, None, impl)

    def _softmax(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        window: int | None,
        impl: Any,
    ) -> Tensor:
        return softmax_attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            mask=mask,
            scale=self.scaling,
            softcap=self.softcap,
            sink=self.sinks,
            dropout=self.dropout if self.training else 0.0,
            impl=impl,
        )

    def kernel_queries(self, q: Tensor) -> Tensor:
        """Queries as one attention kernel takes them: unchanged."""
        return q

    def kernel_keys(self, k: Tensor) -> Tensor:
        """Keys as one attention kernel takes them: unchanged."""
        return k

    def kernel_values(self, v: Tensor) -> Tensor:
        """Values as one attention kernel takes them: unchanged."""
        return v

    def combine(self, x: Tensor, heads: Tensor) -> Tensor:
        """Head outputs from the kernel's outputs: unchanged."""
        return heads

    def combine_maps(self, x: Tensor, maps: Tensor) -> Tensor:
        """Attention maps from the kernel's maps: unchanged."""
        return maps


class DiffOptions(LayerOptions, total=False):
    """Choices that the presets of `DiffAttention` leave open, beside those of every layer."""

    lam_per: LambdaPer
    """what has a lam of its own: "layer", "head", or "group" of heads with one noise head"""
    lambda_start: float | None
    """constant lambda_init in place of the depth schedule"""
    lambda_offset: int
    """added to the layer index in lambda_init; -1 in Motif, +1 in Dragon checkpoints"""
    lambda_std: float
    """standard deviation of the lambda vectors' initialisation (default 0.1)"""
    head_norm: bool
    """RMSNorm of each head, with the factor (1 - lambda_init)"""
    dropout_masks: Literal["shared", "independent"]
    """whether dropout drops the same entries of both maps (default: "shared")"""


class DiffAttention(AttentionLayer):
    """Multi-head differential attention.

        head_h = (softmax(q_h k_h^T s + M) - lam softmax(q'_h k'_h^T s + M)) v_h
        out    = concat_h(f(head_h)) W_O,  f = (1 - lambda_init) RMSNorm with `head_norm`, else id

    The presets `v1`, `v2`, `grouped` and `grouped_latent` name published combinations; their
    arguments give the sizes, and every other choice can be changed one by one.

    Args:
        hidden_size: width of input and output.
        sizes: head counts and widths.
        lam: "exponential" (learned vectors, V1) or "sigmoid" (from each token, V2).
        layer_idx: index of the layer from 0; sets lambda_init where `lam` is "exponential" or
            `head_norm` is on.
        own_noise_key: whether the noise map has keys of its own (V1) or the signal's (V2).
        head_norm: per-head RMSNorm and the factor (1 - lambda_init).
        lam_per: what has a lam of its own: "layer", "head" or "group" (of the signal heads that
            share a noise head); None means "layer" for "exponential", "head" for "sigmoid".
        lambda_start: constant lambda_init in place of the depth schedule.
        lambda_offset: added to `layer_idx` in the depth schedule.
        lambda_std: standard deviation of the lambda vectors' initialisation.
        dropout_masks: "shared" or "independent" masks of the two maps.
        **options: see `LayerOptions`.

    Parameters: `q_proj` with query heads in stripes of r signal heads and their noise head
    (adjacent pairs for r = 1), `k_proj` with (k, k') for each key group, `v_proj`, `o_proj`,
    `lam.lambda_q1` and so on or `lam.lambda_proj`, and `subln` with one gain for all heads; with
    their options `q_norm`, `k_norm`, `g_proj` and `sinks` (in stripes).

    Raises:
        ValueError: sizes do not divide, a pair would read two key groups, or a value has no
            meaning.
        TypeError: an option is unknown.
        NotImplementedError: the named `impl` cannot serve the other options.

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
        lam_per: LambdaPer | None = None,
        lambda_start: float | None = None,
        lambda_offset: int = 0,
        lambda_std: float = 0.1,
        dropout_masks: Literal["shared", "independent"] = "shared",
        **options: Unpack[LayerOptions],
    ) -> None:
        check_options(type(self).__name__, options, LayerOptions.__optional_keys__)
        check_number("lambda_std", lambda_std, least=0)
        check_number("lambda_offset", lambda_offset)
        check_number("layer_idx", layer_idx)
        if lambda_start is not None:
            check_number("lambda_start", lambda_start)
        query_heads = sizes.num_diff_heads + sizes.num_noise_heads
        super().__init__(
            hidden_size,
            query_heads=query_heads,
            key_heads=sizes.num_key_value_heads * (2 if own_noise_key else 1),
            value_heads=sizes.num_key_value_heads,
            output_heads=sizes.num_diff_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_dim,
            **options,
        )
        choose_implementation(self.impl, self.softcap, self.dropout, dropout_masks)
        if lambda_start is not None and lam == "sigmoid" and not head_norm:
            raise ValueError("lambda_start: a sigmoid lam without head norm has no start value")
        self.sizes, self.layer_idx = sizes, layer_idx
        self.own_noise_key, self.dropout_masks = own_noise_key, dropout_masks
        self.kernel_width = sizes.head_dim * (2 if own_noise_key else 1)
        self.num_key_value_groups = query_heads // sizes.num_key_value_heads
        start = lambda_start
        if start is None:
            start = lambda_init(layer_idx, offset=lambda_offset)
        if lam == "exponential":
            self.lam = ExponentialLambda(
                sizes, start=start, std=lambda_std, per="layer" if lam_per is None else lam_per
            )
        elif lam == "sigmoid":
            self.lam = SigmoidLambda(hidden_size, sizes, per="head" if lam_per is None else lam_per)
        else:
            raise ValueError(f"lam: expected 'exponential' or 'sigmoid', got {lam!r}")
        eps = options.get("norm_eps", 1e-5)
        self.subln = HeadNorm(sizes.value_dim, lambda_init=start, eps=eps) if head_norm else None

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
        head_dim: int | None = None,
        **options: Unpack[DiffOptions],
    ) -> Self:
        """DIFF V1 (arXiv 2410.05258): own noise keys, values of 2 D, one lam a layer, head norm.

        Args:
            hidden_size: width of input and output.
            layer_idx: index of the layer from 0.
            match_heads: heads N of the Transformer to match: N/2 pairs of its head width.
            match_key_value_heads: its key/value heads; None means N.
            num_diff_heads: number of pairs, instead of `match_heads`.
            num_key_value_heads: key/value heads, instead of `match_key_value_heads`.
            head_dim: D, width of a query or key; None means hidden_size / N.
            **options: see `DiffOptions` and `LayerOptions`.

        Raises:
            ValueError: heads do not divide.

        Warns:
            UserWarning: `num_diff_heads` narrows the heads of the matched Transformer.
        """
        check_options(f"{cls.__name__}.v1", options, DiffOptions.__optional_keys__)
        return cls.grouped(
            hidden_size,
            ratio=1,
            layer_idx=layer_idx,
            match_heads=match_heads,
            match_key_value_heads=match_key_value_heads,
            num_diff_heads=num_diff_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
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
        **options: Unpack[DiffOptions],
    ) -> Self:
        """DIFF V2 (January 2026): 2 N queries on the keys as they were, lam for each token.

        Args:
            hidden_size: width of input and output.
            match_heads: heads N of the Transformer to match: N output heads.
            match_key_value_heads: its key/value heads; None means N.
            head_dim: width of a head; None means hidden_size / N.
            layer_idx: index of the layer from 0; V2 does not depend on it.
            **options: see `DiffOptions` and `LayerOptions`.

        Raises:
            ValueError: heads do not divide.
        """
        check_options(f"{cls.__name__}.v2", options, DiffOptions.__optional_keys__)
        sizes = match_v2(
            hidden_size,
            match_heads=match_heads,
            match_key_value_heads=match_key_value_heads,
            head_dim=head_dim,
        )
        chosen: dict[str, Any] = {"head_norm": False, **options}
        return cls(
            hidden_size,
            sizes=sizes,
            lam="sigmoid",
            layer_idx=layer_idx,
            own_noise_key=False,
            **chosen,
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
        head_dim: int | None = None,
        **options: Unpack[DiffOptions],
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
            head_dim: as in `v1`.
            **options: see `DiffOptions` and `LayerOptions`.

        Raises:
            ValueError: heads do not divide.
        """
        check_options(f"{cls.__name__}.grouped", options, DiffOptions.__optional_keys__)
        sizes = match_v1(
            hidden_size,
            match_heads=match_heads,
            match_key_value_heads=match_key_value_heads,
            num_diff_heads=num_diff_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            ratio=ratio,
        )
        chosen: dict[str, Any] = {"head_norm": True, **options}
        return cls(
            hidden_size,
            sizes=sizes,
            lam="exponential",
            layer_idx=layer_idx,
            own_noise_key=True,
            **chosen,
        )

    @classmethod
    def grouped_latent(
        cls,
        hidden_size: int,
        *,
        ratio: int,
        match_heads: int,
        match_key_value_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        layer_idx: int = 0,
        **options: Unpack[DiffOptions],
    ) -> Self:
        """The core of Motif 3 (arXiv 2608.09119): shared keys, r:1, lam for each token, a gate.

            out = concat_h(head_h) sigmoid(x W_g) W_O

        Args:
            hidden_size: width of input and output.
            ratio: r, signal heads that share a noise head.
            match_heads: heads N of the Transformer to match: N signal heads, N/r noise heads.
            match_key_value_heads: key/value heads; None gives every noise head its own.
            head_dim: width of a query or key; None means hidden_size / N.
            value_dim: width of a value; None means `head_dim`.
            layer_idx: index of the layer from 0; the core does not depend on it.
            **options: see `DiffOptions` and `LayerOptions`; `lam_per` "head" is Motif 3, "group"
                is Diff-TPA (Dragon); `output_gate` is on.

        Raises:
            ValueError: heads do not divide.

        Differs: Motif 3 makes queries, keys and values from low-rank latents, with a rotary part
            shared by all heads, and its gate from the queries' latent; here all come from x.
        """
        check_options(f"{cls.__name__}.grouped_latent", options, DiffOptions.__optional_keys__)
        sizes = match_v2(
            hidden_size,
            match_heads=match_heads,
            match_key_value_heads=match_key_value_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            ratio=ratio,
        )
        chosen: dict[str, Any] = {"head_norm": False, "output_gate": True, **options}
        return cls(
            hidden_size,
            sizes=sizes,
            lam="sigmoid",
            layer_idx=layer_idx,
            own_noise_key=False,
            **chosen,
        )

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys = self._split_keys(k)
        return self._differential(x, q, keys, v, mask, self.causal, self.window, self.impl)

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
        """Head outputs [B, T, H, E]; the arguments are those of `AttentionLayer.attend_stacked`."""
        if self.lam.is_bare and (self.subln is None or self.subln.is_bare):
            norm = None if self.subln is None else self.subln.scale()
            vectors = self.lam.vectors() if isinstance(self.lam, ExponentialLambda) else None
            given = (() if vectors is None else vectors[:4]) + (() if norm is None else norm[:1])
            if self._is_step(q, k, v, mask, impl, *given):
                return attention_step(
                    q,
                    k,
                    v,
                    Scoring(causal, None, mask, self.scaling),
                    ratio=self.sizes.ratio,
                    own_noise_key=self.own_noise_key,
                    value_dim=self.value_dim,
                    lam=self.lam(x) if vectors is None else vectors,
                    sinks=self.sinks,
                    norm=norm,
                )
        k_noise = None
        if self.own_noise_key:
            k, k_noise = k.split(self.head_dim, dim=-1)
        v = v[..., : self.value_dim]
        return self._differential(x, q, (k, k_noise), v, mask, causal, None, impl)

    def _differential(
        self,
        x: Tensor,
        q: Tensor,
        keys: tuple[Tensor, Tensor | None],
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        window: int | None,
        impl: Any,
    ) -> Tensor:
        ratio = self.sizes.ratio
        q, q_noise = split_stripes(q, ratio)
        k, k_noise = keys
        sink = sink_noise = None
        if self.sinks is not None:
            stripes = self.sinks.unflatten(0, (-1, ratio + 1))
            sink, sink_noise = stripes[:, :ratio].flatten(), stripes[:, ratio]
        heads = diff_attention(
            q,
            k,
            v,
            q_noise,
            k_noise,
            lam=self.lam(x),
            causal=causal,
            window=window,
            mask=mask,
            scale=self.scaling,
            softcap=self.softcap,
            sink=sink,
            sink_noise=sink_noise,
            dropout=self.dropout if self.training else 0.0,
            dropout_masks=self.dropout_masks,  # pyright: ignore[reportArgumentType]
            impl=impl,
        )
        return heads if self.subln is None else self.subln(heads)

    def kernel_queries(self, q: Tensor) -> Tensor:
        """Queries as one stock attention kernel takes them, [B, T, H + N, W]."""
        signal, noise = split_stripes(q, self.sizes.ratio)
        return stack_queries(signal, noise, own_noise_key=self.own_noise_key)

    def kernel_keys(self, k: Tensor) -> Tensor:
        """Keys as one stock attention kernel takes them, [B, S, G, W], W = 2 D for [k | k']."""
        return k.unflatten(2, (-1, 2)).flatten(3) if self.own_noise_key else k

    def kernel_values(self, v: Tensor) -> Tensor:
        """Values as one stock attention kernel takes them: narrower ones filled up to W."""
        missing = self.kernel_width - self.value_dim
        return F.pad(v, (0, missing)) if missing > 0 else v

    def combine(self, x: Tensor, heads: Tensor) -> Tensor:
        """Head outputs [B, T, H, E] from the stock kernel's [B, T, H + N, E or W]; lam from `x`."""
        signal, noise = split_stripes(heads[..., : self.value_dim], self.sizes.ratio)
        heads = subtract_outputs(signal, noise, self.lam(x))
        return heads if self.subln is None else self.subln(heads)

    def combine_maps(self, x: Tensor, maps: Tensor) -> Tensor:
        """Differential maps [B, H, T, S] from the stock kernel's [B, H + N, T, S]."""
        signal, noise = split_stripes(maps.transpose(1, 2), self.sizes.ratio)
        return subtract_maps(signal.transpose(1, 2), noise.transpose(1, 2), self.lam(x))

    def _split_keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.own_noise_key:
            return k, None
        signal, noise = k.unflatten(2, (-1, 2)).unbind(3)
        return signal, noise
