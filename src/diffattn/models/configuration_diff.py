"""Configuration of the differential Transformer language model."""

import math
from typing import Any

from transformers import PreTrainedConfig

from diffattn.nn import DiffSizes, match_v1, match_v2

ATTENTION_KINDS = ("softmax", "v1", "v2", "grouped")


class DiffTransformerConfig(PreTrainedConfig):
    """Configuration of `DiffTransformerModel`.

    The user names the Transformer to be matched (`match_heads`, `match_key_value_heads`) and the
    kind of attention; every head count and width follows. The geometry that an attention kernel
    sees is derived and stored beside it (`num_attention_heads`, `num_key_value_heads`,
    `head_dim`), because engines size their caches from these three.

    Args:
        vocab_size: entries of the vocabulary.
        hidden_size: model width.
        intermediate_size: inner width of SwiGLU; None means 8/3 hidden_size rounded up to 8.
        num_hidden_layers: number of blocks.
        attention: "softmax", "v1", "v2" or "grouped", for all layers or one name for each.
        match_heads: heads N of the Transformer to be matched.
        match_key_value_heads: its key/value heads; None means N.
        noise_ratio: signal heads that share a noise head where the kind is "grouped".
        rope_theta: base of the rotary positions.
        max_position_embeddings: positions that training covers; informative.
        rms_norm_eps: epsilon of all norms.
        initializer_range: standard deviation of the normal initialisation of all matrices; None
            means the authors': torch's default for linear maps, uniform in +- fan_in^-1/2, and
            N(0, hidden_size^-1/2) for embeddings, half of that (our choice) where they are tied.
        scale_embeddings: whether embeddings are multiplied by hidden_size^1/2, so that the
            residual stream starts at unit scale beside the normed heads of V1.
        lambda_std: standard deviation of the lambda vectors' initialisation.
        lambda_start: constant lambda_init instead of the depth schedule.
        attention_dropout: probability of dropping an entry of a map in training; stock kernels
            draw a mask for each of the two maps.
        tie_word_embeddings: whether the output layer shares the input embedding.
        use_cache: whether generation keeps keys and values.

    Raises:
        ValueError: an unknown kind, a list of the wrong length, or heads that do not divide.

    Source: LLaMA-style decoder of Ye et al., arXiv 2410.05258, section 2: pre-RMSNorm, SwiGLU,
        rotary positions, no biases.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_hidden_layers: int = 8
    attention: str | list[str] = "v1"
    match_heads: int = 8
    match_key_value_heads: int | None = None
    noise_ratio: int = 2
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    initializer_range: float | None = None
    scale_embeddings: bool = True
    lambda_std: float = 0.1
    lambda_start: float | None = None
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the kinds, derive the inner width and the kernel's geometry."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "match_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a whole number from 1, got {value!r}")
        rope = kwargs.pop("rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type: expected 'default', got {rope['rope_type']!r}")
        self.rope_theta = rope.get("rope_theta", self.rope_theta)
        if not self.rms_norm_eps >= 0:
            raise ValueError(f"rms_norm_eps: expected 0 or more, got {self.rms_norm_eps}")
        if self.lambda_start is not None and not math.isfinite(self.lambda_start):
            raise ValueError(f"lambda_start: expected a finite number, got {self.lambda_start}")
        if not isinstance(self.rope_theta, (int, float)) or not self.rope_theta > 0:
            raise ValueError(f"rope_theta: expected a number above 0, got {self.rope_theta!r}")
        kinds = self.attention if isinstance(self.attention, list) else [self.attention]
        for kind in kinds:
            if kind not in ATTENTION_KINDS:
                raise ValueError(f"attention: expected one of {ATTENTION_KINDS}, got {kind!r}")
        if isinstance(self.attention, list) and len(self.attention) != self.num_hidden_layers:
            raise ValueError(
                f"attention: expected {self.num_hidden_layers} kinds, one for each layer, got "
                f"{len(self.attention)}"
            )
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // 3 // 8) * 8
        geometries = [self.kernel_geometry(index) for index in range(self.num_hidden_layers)]
        heads, groups, width = geometries[0]
        for name, value in (
            ("num_attention_heads", heads),
            ("num_key_value_heads", groups),
            ("head_dim", width),
        ):
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name}: follows from attention and match_heads as {value}, got "
                    f"{getattr(self, name)}"
                )
            setattr(self, name, value)
        super().__post_init__(**kwargs)

    def attention_kind(self, layer_idx: int) -> str:
        """Kind of attention of a layer, counted from 0."""
        return self.attention if isinstance(self.attention, str) else self.attention[layer_idx]

    def diff_sizes(self, layer_idx: int) -> DiffSizes:
        """Geometry of a differential layer, counted from 0."""
        kind = self.attention_kind(layer_idx)
        if kind == "v2":
            return match_v2(
                self.hidden_size,
                match_heads=self.match_heads,
                match_key_value_heads=self.match_key_value_heads,
            )
        return match_v1(
            self.hidden_size,
            match_heads=self.match_heads,
            match_key_value_heads=self.match_key_value_heads,
            ratio=self.noise_ratio if kind == "grouped" else 1,
        )

    def kernel_geometry(self, layer_idx: int) -> tuple[int, int, int]:
        """Query heads, key/value heads and head width of the one attention call of a layer.

        Engines that read the geometry from the configuration see layer 0's; they can serve a
        model whose layers are all of one kind.
        """
        if self.attention_kind(layer_idx) == "softmax":
            groups = self.match_key_value_heads
            groups = self.match_heads if groups is None else groups
            if (
                min(groups, self.match_heads) < 1
                or self.hidden_size % self.match_heads
                or self.match_heads % groups
            ):
                raise ValueError(
                    f"match_heads: {self.match_heads} must divide hidden_size = "
                    f"{self.hidden_size} and be a multiple of match_key_value_heads = {groups}"
                )
            return self.match_heads, groups, self.hidden_size // self.match_heads
        sizes = self.diff_sizes(layer_idx)
        own_noise_key = self.attention_kind(layer_idx) != "v2"
        return (
            sizes.num_diff_heads + sizes.num_noise_heads,
            sizes.num_key_value_heads,
            sizes.head_dim * (2 if own_noise_key else 1),
        )
