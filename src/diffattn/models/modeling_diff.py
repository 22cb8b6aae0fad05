"""The differential Transformer language model: one decoder, attention chosen by a table."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from diffattn.models.configuration_diff import PRESETS, DiffTransformerConfig
from diffattn.models.eager import eager_attention
from diffattn.models.engines import check_engine, check_one_geometry
from diffattn.models.fused import NAME as FUSED
from diffattn.models.fused import seen_in_order
from diffattn.models.inputs import check_beside, check_rows
from diffattn.models.masks import layer_masks
from diffattn.models.plans import check_tensor_parallel
from diffattn.models.positions import count_positions
from diffattn.models.static_slots import without_unused_slots
from diffattn.nn import (
    AttentionLayer,
    DiffAttention,
    ExponentialLambda,
    Fp32Module,
    LayerOptions,
    PolyNorm,
    RMSNorm,
    SoftmaxAttention,
)
from diffattn.ops import rotary_angles

Rotation = tuple[Tensor, Tensor]

# the second field of the outputs: "cache" since transformers 5.24, "past_key_values" before
_CACHE_FIELD = fields(BaseModelOutputWithPast)[1].name


class _ModelAttention(AttentionLayer):
    """The forward pass of every attention layer: exactly one call of the attention interface."""

    config: DiffTransformerConfig
    layer_idx: int
    is_causal = True

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] the models' own contract
        self,
        hidden_states: Tensor,
        position_embeddings: Rotation,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [B, T, hidden_size] and, where the kernel returns maps, [B, H, T, S]."""
        self._check_kernel(cache, bool(kwargs.get("output_attentions")))
        name = (self.config._attn_implementation or "eager").removeprefix("paged|")
        query = self.queries(hidden_states, position_embeddings)
        key = self.kernel_keys(self.keys(hidden_states, position_embeddings)).transpose(1, 2)
        value = self.kernel_values(self.values(hidden_states)).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        if name == FUSED:
            heads = self._fused(hidden_states, query, key, value, attention_mask)
            return self.output(hidden_states, heads).to(hidden_states.dtype), None
        query = self.kernel_queries(query).transpose(1, 2)
        if cache is not None:
            key, value = without_unused_slots(cache, attention_mask, key, value)
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        heads, maps = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            sliding_window=self.window,
            softcap=self.softcap,
            s_aux=self.sinks,
            **kwargs,
        )
        heads = heads.reshape(*hidden_states.shape[:-1], -1, value.shape[-1])
        heads = self.combine(hidden_states, heads)
        output = self.output(hidden_states, heads).to(hidden_states.dtype)
        return output, None if maps is None else self.combine_maps(hidden_states, maps)

    def _fused(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """Heads [B, T, H, E] by one call of the compiled kernel, subtraction included."""
        causal, key, value = seen_in_order(mask, query.shape[1], key, value, causal=True)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        return self.attend_stacked(x, query, key, value, mask, causal=causal, impl="fused")

    def _check_kernel(self, cache: Cache | None, wants_maps: bool) -> None:
        """Refuse kernels that would leave out what was asked for without a word."""
        name = (self.config._attn_implementation or "eager").removeprefix("paged|")
        if wants_maps and name != "eager":
            raise NotImplementedError(
                f"output_attentions: attn_implementation={name!r} returns no maps; ask for 'eager'"
            )
        if name == "flex_attention" and cache is not None and cache.is_compileable:
            # its mask reads the cache's length when the kernel runs, after the cache has grown
            raise NotImplementedError(
                "attn_implementation='flex_attention' would let queries see later keys in a "
                "static cache: ask for 'sdpa', or a cache that grows"
            )
        if name.startswith(("eager", "flex_attention", "flash_attention")) or name == FUSED:
            return
        for option, value in (("attention_softcap", self.softcap), ("attention_sink", self.sinks)):
            if value is not None:
                raise NotImplementedError(
                    f"attn_implementation={name!r} is not known to honour {option}: ask for "
                    "'eager' or 'flex_attention'"
                )


def _options_of_every_layer(config: DiffTransformerConfig, layer_idx: int) -> LayerOptions:
    eps = config.rms_norm_eps if config.head_norm_eps is None else config.head_norm_eps
    return {
        "bias": config.attention_bias,
        "output_bias": config.attention_output_bias,
        "window": config.window(layer_idx),
        "qk_norm": config.qk_norm,
        "softcap": config.attention_softcap,
        "sink": config.attention_sink,
        "norm_eps": eps,
        "dropout": config.attention_dropout,
    }


class DiffTransformerSoftmaxAttention(_ModelAttention, SoftmaxAttention):  # pyright: ignore
    """The Transformer's attention: `diffattn.nn.SoftmaxAttention` behind the interface."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        heads, groups, width = config.kernel_geometry(layer_idx)
        super().__init__(
            config.hidden_size,
            num_heads=heads,
            num_key_value_heads=groups,
            head_dim=width,
            **_options_of_every_layer(config, layer_idx),
        )
        self.config, self.layer_idx = config, layer_idx


class DiffTransformerDiffAttention(_ModelAttention, DiffAttention):  # pyright: ignore
    """Differential attention: `diffattn.nn.DiffAttention` behind the interface."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        choices = config.diff_choices(layer_idx)
        options = _options_of_every_layer(config, layer_idx)
        options["output_gate"] = choices.output_gate
        super().__init__(
            config.hidden_size,
            sizes=config.diff_sizes(layer_idx),
            lam=choices.lam,  # pyright: ignore[reportArgumentType] checked by the layer
            lam_per=choices.lam_per,  # pyright: ignore[reportArgumentType]
            layer_idx=layer_idx,
            own_noise_key=choices.own_noise_key,
            head_norm=choices.head_norm,
            lambda_start=config.lambda_start if choices.has_lambda_init else None,
            lambda_offset=config.lambda_layer_offset,
            lambda_std=config.lambda_std,
            dropout_masks="independent",
            **options,
        )
        self.config = config


ATTENTION_CLASSES: dict[str, Callable[[DiffTransformerConfig, int], _ModelAttention]] = {
    "softmax": DiffTransformerSoftmaxAttention,
    **dict.fromkeys(PRESETS, DiffTransformerDiffAttention),
}


class DiffTransformerEmbedding(nn.Embedding):
    """Token embedding, multiplied by sqrt(hidden_size) where the configuration says so."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.embed_scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0

    def forward(self, input: Tensor) -> Tensor:
        """[B, T] ids to [B, T, hidden_size]."""
        return super().forward(input) * self.embed_scale


class DiffTransformerMLP(nn.Module):
    """Gated feed-forward: (act(x W_gate) * x W_up) W_down, act = silu is SwiGLU."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        assert inner is not None  # the configuration has derived it
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = PolyNorm() if config.hidden_act == "poly_norm" else nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden_size] to the same."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DiffTransformerDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block: attention, then feed-forward, each with its residual."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        attention = ATTENTION_CLASSES[config.attention_kind(layer_idx)]
        self.self_attn = attention(config, layer_idx)
        self.mlp = DiffTransformerMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: Rotation | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[B, T, hidden_size] to the same."""
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            cache=cache,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DiffTransformerPreTrainedModel(PreTrainedModel):
    """Initialisation and loading shared by the model classes."""

    config: DiffTransformerConfig
    config_class = DiffTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DiffTransformerDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        "lambda_q1",
        "lambda_k1",
        "lambda_q2",
        "lambda_k2",
        "lambda_proj",
        "subln",
        "q_norm",
        "k_norm",
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
        "act_fn",
        "sinks",
    ]
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DiffTransformerDecoderLayer,
        "attentions": _ModelAttention,
    }

    def __init__(self, config: DiffTransformerConfig, *args: Any, **kwargs: Any) -> None:
        config.derive()  # a field may have been changed since the configuration was made
        super().__init__(config, *args, **kwargs)
        self._built_with = config.built_in()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # the guarded functions of transformers leave loaded tensors alone
        fixed = self.config.initializer_range
        if isinstance(module, nn.Linear) and fixed is None:
            init.uniform_(module.weight, -(module.in_features**-0.5), module.in_features**-0.5)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=self._embedding_std() if fixed is None else fixed)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, PolyNorm):
            init.constant_(module.weight, module.start)
            init.zeros_(module.bias)
        elif isinstance(module, ExponentialLambda):
            for vector in module.parameters():
                init.normal_(vector, std=module.std)
        elif isinstance(module, AttentionLayer) and module.sinks is not None:
            init.zeros_(module.sinks)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, Fp32Module):
            for name, value in module.constants.items():
                init.constant_(getattr(module, name), value)

    def _embedding_std(self) -> float:
        # a tied output layer with the authors' spread would start by naming the token just read
        tied = self.config.tie_word_embeddings
        return self.config.hidden_size**-0.5 * (0.5 if tied else 1.0)

    def _sdpa_can_dispatch(self, is_init_check: bool = False) -> bool:
        for option in ("attention_softcap", "attention_sink"):
            if getattr(self.config, option):
                raise ValueError(
                    f"attn_implementation='sdpa' runs torch's kernel, which takes no {option}: "
                    "ask for 'eager' or 'flex_attention'"
                )
        return super()._sdpa_can_dispatch(is_init_check)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Split the empty model over processes; transformers calls it before it reads weights.

        Raises:
            UserError: the degree of tensor parallelism would part a pair from its keys.
        """
        if distributed_config is not None:
            check_tensor_parallel(model.config, distributed_config.tp_size)
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Write weights and configuration; see `transformers.PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: a field that was built into the model has been changed since, so that the
                checkpoint would compute something else.
        """
        self.config.derive()
        for name, now in self.config.built_in().items():
            if now != self._built_with[name]:
                raise ValueError(
                    f"{name}: expected {self._built_with[name]!r}, with which the model was "
                    f"built, got {now!r}; build a new model to change it"
                )
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint; see `transformers.PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: the checkpoint lacks tensors of the model or holds others; the message
                names them.

        Differs: transformers fills missing tensors with random numbers, drops others, and warns;
            it also reads pickled weights where there are no safetensors.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("use_safetensors", True)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        # a base model is loaded from a whole one without the output layer
        extra = {name for name in info["unexpected_keys"] if not name.startswith("lm_head.")}
        for says, names in (("lacks", info["missing_keys"]), ("has no place for", extra)):
            if names:
                first = sorted(names)[:8]
                raise ValueError(
                    f"checkpoint: {cls.__name__} {says} {len(names)} tensor(s): "
                    f"{', '.join(first)}{', ...' if len(names) > 8 else ''}"
                )
        return (model, info) if wants_info else model


class DiffTransformerModel(DiffTransformerPreTrainedModel):
    """The decoder without an output layer.

    Args:
        config: see `DiffTransformerConfig`.
    """

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        check_engine(config)
        self.embed_tokens = DiffTransformerEmbedding(config)
        self.layers = nn.ModuleList(
            DiffTransformerDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder.

        Args:
            input_ids: [B, T] token ids; or give `inputs_embeds`.
            attention_mask: [B, S] with 0 for padding; or a prepared mask, bool (True = visible)
                or added to the scores, [B or 1, 1 or query heads, T, S], for all layers as it is,
                windows included, or one for each of the configuration's layer types.
            position_ids: [B, T]; None counts visible tokens of each row. Positions that start
                anew within a row separate packed documents.
            cache: keys and values of earlier steps.
            inputs_embeds: [B, T, hidden_size] in place of `input_ids`.
            use_cache: whether to return a cache.
            past_key_values: the name of `cache` before transformers 5.24.
            **kwargs: passed to the attention implementation; `cu_seq_lens_q` [documents + 1],
                lengths summed up from 0, separates packed documents too.

        Returns:
            `last_hidden_state` [B, T, hidden_size], `cache`; and with `output_attentions` (eager
            attention) the maps [B, H, T, S] of each layer: for a differential layer the
            difference of both.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds` are given; shapes do not
                fit each other; a mask has another form, or the attention implementation has no
                mask function and is no engine's.
        """
        check_rows(input_ids, inputs_embeds, self.config.hidden_size)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        check_beside(
            *hidden_states.shape[:2],
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            cache=cache,
            layer_types=self.config.layer_types or [],
        )
        masks = layer_masks(
            self.config,
            hidden_states,
            attention_mask,
            cache,
            position_ids,
            cu_seqlens,
            training=self.training and torch.is_grad_enabled(),
        )
        if position_ids is None:
            position_ids = count_positions(hidden_states, attention_mask, cache, cu_seqlens)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        rotation = rotary_angles(
            position_ids,
            self.config.query_width,
            theta=self.config.rope_theta,
            dtype=torch.promote_types(hidden_states.dtype, torch.float32),
        )
        layers = self.layers[: self.config.num_hidden_layers]  # fewer in an early exit's draft
        for layer, layer_type in zip(layers, self.config.layer_types or [], strict=False):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                cache=cache,
                position_embeddings=rotation,
                position_ids=position_ids,
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), cache if use_cache else None)


class DiffTransformerForCausalLM(DiffTransformerPreTrainedModel, GenerationMixin):
    """The decoder with a next-token output layer.

    Args:
        config: see `DiffTransformerConfig`.

    Example:
        >>> config = DiffTransformerConfig(
        ...     vocab_size=64, hidden_size=64, num_hidden_layers=2, match_heads=4
        ... )
        >>> model = DiffTransformerForCausalLM(config)
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 64])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012 # pyright: ignore
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token of each position.

        Args:
            input_ids: as in `DiffTransformerModel`; so for the arguments not named here.
            attention_mask: as there.
            position_ids: as there.
            cache: as there.
            inputs_embeds: as there.
            labels: [B, T] token ids, not shifted; -100 leaves a position out of the loss.
            use_cache: as there.
            logits_to_keep: number of last positions to predict (0 = all), or their indices.
            past_key_values: as there.
            **kwargs: passed to the loss and the attention implementation.

        Returns:
            `loss` in nats per labelled token, `logits` [B, T, vocab_size], `cache`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden_states = hidden_states[:, logits_to_keep]
        elif logits_to_keep:
            hidden_states = hidden_states[:, -logits_to_keep:]
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss,
            logits,
            getattr(outputs, _CACHE_FIELD),
            outputs.hidden_states,
            outputs.attentions,
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Start `generate_batch`; see `transformers.PreTrainedModel.init_continuous_batching`.

        Raises:
            NotImplementedError: layers need caches of different shapes, or transformers is older
                than 5.24.
        """
        if _CACHE_FIELD != "cache":
            raise NotImplementedError(
                f"generate_batch: needs transformers 5.24 or later, got {transformers.__version__}"
            )
        check_one_geometry(self.config, "continuous batching")
        return super().init_continuous_batching(*args, **kwargs)
