"""Configuration of the differential Transformer language model."""

import copy
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from diffattn.models.fields import check_fields, fields
from diffattn.models.plans import tensor_parallel_plan
from diffattn.models.rope import NAMES as ROPE_NAMES
from diffattn.models.rope import plain_rope_theta
from diffattn.nn import DiffSizes, match_v1, match_v2


class DiffChoices(NamedTuple):
    """What makes one kind of differential attention differ from another."""

    lam: str
    lam_per: str
    own_noise_key: bool
    head_norm: bool
    wide_values: bool
    output_gate: bool

    @property
    def has_lambda_init(self) -> bool:
        """Whether the constant lambda_init stands anywhere in the layer."""
        return self.lam == "exponential" or self.head_norm


PRESETS = {
    "v1": DiffChoices("exponential", "layer", True, True, True, False),
    "v2": DiffChoices("sigmoid", "head", False, False, False, False),
    "grouped": DiffChoices("exponential", "layer", True, True, True, False),
    "grouped_latent": DiffChoices("sigmoid", "head", False, False, False, True),
}
ATTENTION_KINDS = ("softmax", *PRESETS)
FIELDS = fields(ATTENTION_KINDS)


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
        attention: "softmax", "v1", "v2", "grouped" or "grouped_latent", for all layers or one
            name for each.
        match_heads: heads N of the Transformer to be matched.
        match_key_value_heads: its key/value heads; None means N, for the grouped kinds one for
            each noise head.
        match_head_dim: its head width; None means hidden_size / N.
        noise_ratio: signal heads that share a noise head in the grouped kinds.
        lam: "exponential" or "sigmoid" in place of what the kind says; so for the next five.
        lam_per: "layer", "head" or "group".
        own_noise_key: whether the noise map has keys of its own.
        head_norm: per-head RMSNorm and the factor (1 - lambda_init).
        wide_values: values of twice the head width, or of the head width.
        output_gate: multiply the joined heads by sigmoid(x W_g).
        qk_norm: RMSNorm over each query and key head, in every layer.
        attention_sink: a learned sink logit for each query head, in every layer.
        attention_softcap: c, scores x become c tanh(x / c), in every layer.
        attention_bias: whether q, k and v projections have biases.
        attention_output_bias: whether the output projection has one; None means the same.
        hidden_act: "silu" (SwiGLU) or "poly_norm" (Motif's).
        sliding_window: w, positions that a "sliding_attention" layer sees, its own included.
        layer_types: "full_attention" or "sliding_attention" for each layer; None means all
            sliding where `sliding_window` is given, else all full.
        rope_theta: base of the rotary positions; transformers' `rope_parameters` may give it, and
            ask for nothing but plain positions.
        max_position_embeddings: positions that training covers; informative.
        rms_norm_eps: epsilon of all norms.
        head_norm_eps: epsilon of the norms inside attention; None means `rms_norm_eps`.
        initializer_range: standard deviation of the normal initialisation of all matrices; None
            means the authors': torch's default for linear maps, uniform in +- fan_in^-1/2, and
            N(0, hidden_size^-1/2) for embeddings, half of that (our choice) where they are tied.
        scale_embeddings: whether embeddings are multiplied by hidden_size^1/2, so that the
            residual stream starts at unit scale beside the normed heads of V1.
        lambda_std: standard deviation of the lambda vectors' initialisation.
        lambda_start: constant lambda_init instead of the depth schedule.
        lambda_layer_offset: added to the layer index in the depth schedule; -1 in Motif.
        attention_dropout: probability of dropping an entry of a map in training; stock kernels
            draw a mask for each of the two maps.
        tie_word_embeddings: whether the output layer shares the input embedding.
        use_cache: whether generation keeps keys and values.

    Raises:
        ValueError: a field holds what it may not (see `diffattn.models.fields`), a list has the
            wrong length, heads do not divide, or rotary positions are not plain.

    Source: LLaMA-style decoder of Ye et al., arXiv 2410.05258, section 2: pre-RMSNorm, SwiGLU,
        rotary positions, no biases.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012
    # the last norm stays in fp32, so it does not share a group of FSDP with the output layer
    base_model_fsdp_plan = dict.fromkeys(("embed_tokens", "layers.*", "norm"), "free_full_weight")
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_hidden_layers: int = 8
    attention: str | list[str] = "v1"
    match_heads: int = 8
    match_key_value_heads: int | None = None
    match_head_dim: int | None = None
    noise_ratio: int = 2
    lam: str | None = None
    lam_per: str | None = None
    own_noise_key: bool | None = None
    head_norm: bool | None = None
    wide_values: bool | None = None
    output_gate: bool | None = None
    qk_norm: bool = False
    attention_sink: bool = False
    attention_softcap: float | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    head_norm_eps: float | None = None
    initializer_range: float | None = None
    scale_embeddings: bool = True
    lambda_std: float = 0.1
    lambda_start: float | None = None
    lambda_layer_offset: int = 0
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
        for name in ROPE_NAMES:
            self.rope_theta = plain_rope_theta(name, kwargs.pop(name, None), self.rope_theta)
        factor = kwargs.pop("partial_rotary_factor", None)
        plain_rope_theta("rotary positions", {"partial_rotary_factor": factor}, self.rope_theta)
        given = (self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        self.derive()
        for name, value in zip(
            ("num_attention_heads", "num_key_value_heads", "head_dim"), given, strict=True
        ):
            if value not in (None, getattr(self, name)):
                raise ValueError(
                    f"{name}: follows from attention and match_heads as {getattr(self, name)}, "
                    f"got {value}"
                )
        super().__post_init__(**kwargs)

    def derive(self) -> None:
        """Check every field and set what follows from it anew; a model does so when it is built.

        Raises:
            ValueError: a field has no meaning, or two do not fit each other.
        """
        check_fields(self, FIELDS)
        self._check_rotary()
        if isinstance(self.attention, list) and len(self.attention) != self.num_hidden_layers:
            raise ValueError(
                f"attention: expected {self.num_hidden_layers} kinds, one for each layer, got "
                f"{len(self.attention)}"
            )
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // 3 // 8) * 8
        types = None if self.layer_types is None else list(self.layer_types)
        if types is None:
            types = ["full_attention" if self.sliding_window is None else "sliding_attention"]
        if len(set(types)) == 1:  # one type for all layers, however many there are by now
            types = types[:1] * self.num_hidden_layers
        self.layer_types = types
        self._check_windows(types)
        geometries = [self.kernel_geometry(index) for index in range(self.num_hidden_layers)]
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = geometries[0]
        self.base_model_tp_plan = tensor_parallel_plan(self)  # pyright: ignore

    def __setattr__(self, key: str, value: Any) -> None:
        """Set a field; the base of the rotary positions is one, by whichever name it comes."""
        if key in ROPE_NAMES:
            self.rope_theta = plain_rope_theta(key, value, self.rope_theta)
        elif key == "rope_theta":
            for parameters in filter(None, map(vars(self).get, ROPE_NAMES)):
                parameters["rope_theta"] = value
        super().__setattr__(key, value)

    def _check_rotary(self) -> None:
        for name in ROPE_NAMES:  # transformers' dictionary may have been changed inside
            theta = plain_rope_theta(name, vars(self).get(name), self.rope_theta)
            if theta != self.rope_theta:
                raise ValueError(
                    f"{name}: expected the configuration's rope_theta = {self.rope_theta}, got "
                    f"{theta}"
                )
        if self.query_width % 2 == 0:
            return
        if self.match_head_dim is not None:
            raise ValueError(
                f"match_head_dim: rotary positions need an even width, got {self.match_head_dim}"
            )
        raise ValueError(
            f"match_heads: {self.match_heads} heads of hidden_size = {self.hidden_size} are "
            f"{self.query_width} wide, but rotary positions need an even width"
        )

    def built_in(self) -> dict[str, Any]:
        """The fields that a model reads when it is built, as they are now."""
        names = [name for name, field in FIELDS.items() if field.built_in]
        return {name: copy.copy(getattr(self, name)) for name in names}

    def _check_windows(self, types: list[str]) -> None:
        if len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types: expected {self.num_hidden_layers} names, one for each layer, got "
                f"{len(types)}"
            )
        if ("sliding_attention" in types) != (self.sliding_window is not None):
            raise ValueError(
                f"sliding_window: {self.sliding_window} does not fit layer_types = {types}; set "
                "both, or layer_types to None"
            )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Write config.json; see `transformers.PreTrainedConfig.save_pretrained`."""
        self.derive()  # a field may have been changed since
        super().save_pretrained(*args, **kwargs)

    @property
    def query_width(self) -> int:
        """D, the width of a query or key head of one map, in every layer."""
        if self.match_head_dim is not None:
            return self.match_head_dim
        if self.hidden_size % self.match_heads:
            raise ValueError(
                f"match_heads: {self.match_heads} does not divide hidden_size = {self.hidden_size}"
            )
        return self.hidden_size // self.match_heads

    def attention_kind(self, layer_idx: int) -> str:
        """Kind of attention of a layer, counted from 0."""
        return self.attention if isinstance(self.attention, str) else self.attention[layer_idx]

    def window(self, layer_idx: int) -> int | None:
        """Positions that a layer sees, or None for all."""
        types = self.layer_types or []
        return self.sliding_window if types[layer_idx] == "sliding_attention" else None

    def diff_choices(self, layer_idx: int) -> DiffChoices:
        """The choices of a differential layer: its kind's, and what was chosen instead."""
        preset = PRESETS[self.attention_kind(layer_idx)]
        chosen = {name: getattr(self, name) for name in DiffChoices._fields}
        lam = chosen["lam"]
        if lam is not None and lam != preset.lam:
            preset = preset._replace(lam_per="layer" if lam == "exponential" else "head")
        return preset._replace(**{n: value for n, value in chosen.items() if value is not None})

    def diff_sizes(self, layer_idx: int) -> DiffSizes:
        """Geometry of a differential layer, counted from 0."""
        kind = self.attention_kind(layer_idx)
        match = match_v2 if kind in ("v2", "grouped_latent") else match_v1
        sizes = match(
            self.hidden_size,
            match_heads=self.match_heads,
            match_key_value_heads=self.match_key_value_heads,
            head_dim=self.match_head_dim,
            ratio=self.noise_ratio if kind.startswith("grouped") else 1,
        )
        wide = self.diff_choices(layer_idx).wide_values
        return DiffSizes(
            num_diff_heads=sizes.num_diff_heads,
            num_noise_heads=sizes.num_noise_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.head_dim * (2 if wide else 1),
        )

    def kernel_geometry(self, layer_idx: int) -> tuple[int, int, int]:
        """Query heads, key/value heads and head width of the one attention call of a layer.

        Engines that read the geometry from the configuration see layer 0's; they can serve a
        model whose layers are all of one kind.
        """
        if self.attention_kind(layer_idx) == "softmax":
            groups = self.match_key_value_heads
            groups = self.match_heads if groups is None else groups
            if groups < 1 or self.match_heads % groups:
                raise ValueError(
                    f"match_key_value_heads: {groups} does not divide match_heads = "
                    f"{self.match_heads}"
                )
            return self.match_heads, groups, self.query_width
        sizes = self.diff_sizes(layer_idx)
        return (
            sizes.num_diff_heads + sizes.num_noise_heads,
            sizes.num_key_value_heads,
            sizes.head_dim * (2 if self.diff_choices(layer_idx).own_noise_key else 1),
        )
