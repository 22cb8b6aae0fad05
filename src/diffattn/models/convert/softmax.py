"""A differential model that starts from a plain, trained one."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.models.convert.config_errors import reading_config
from diffattn.models.convert.shapes import State, check_tensors, our_shapes
from diffattn.models.modeling_diff import DiffTransformerForCausalLM
from diffattn.nn import DiffAttention
from diffattn.nn.lambdas import VECTORS

PLAIN_MODELS = ("llama", "mistral", "qwen2", "qwen3")


def plain_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Configuration of a plain decoder, of the class that its model_type names.

    Args:
        config: config.json.

    Raises:
        UserError: it is none of these models, or a value has no meaning.
    """
    _refuse_kind(config.get("model_type"))
    with reading_config():
        return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))


def plain_model(config: PreTrainedConfig, state: State) -> PreTrainedModel:
    """The plain decoder itself, with these weights."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with reading_config():
        # pyright does not know that weights may come without a folder
        return kind.from_pretrained(None, config=config, state_dict=dict(state))  # pyright: ignore


def from_softmax_v2(
    config: PreTrainedConfig, state: State
) -> tuple[DiffTransformerConfig, dict[str, Tensor]]:
    """A plain decoder as V2, exactly: the logits of step 0 are the source's.

        q' = q,  lam = sigmoid(0) = 1/2,  W_O <- 2 W_O:  2 (A v - A v / 2) = A v

    Signal and noise queries are equal and get different gradients, and so does lam, so training
    moves every new parameter from the first step on.

    Args:
        config: of a llama, mistral, qwen2 or qwen3 model with default rotary positions.
        state: its state dict.

    Returns:
        Configuration and state dict of `DiffTransformerForCausalLM`.

    Raises:
        UserError: the source has what our model does not, or a tensor is missing, extra or of
            another shape; the message names it.
    """
    heads = config.num_attention_heads
    with reading_config():
        ours = DiffTransformerConfig(
            **shared_fields(config),
            attention="v2",
            match_heads=heads,
            match_key_value_heads=_groups(config),
        )
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".q_proj." in name:  # each head twice, side by side
            converted[name] = tensor.unflatten(0, (heads, -1)).repeat_interleave(2, 0).flatten(0, 1)
        elif name.endswith(".o_proj.weight"):
            converted[name] = 2 * tensor
            lam = tensor.new_zeros(heads, config.hidden_size, dtype=torch.float32)
            converted[name.replace("o_proj", "lam.lambda_proj")] = lam
        else:
            converted[name] = tensor
    check_tensors(config.model_type, converted, our_shapes(ours))
    return ours, converted


def from_softmax_v1(
    config: PreTrainedConfig, state: State, *, lambda_start: float = 0.2, seed: int = 0
) -> tuple[DiffTransformerConfig, dict[str, Tensor]]:
    """A plain decoder as V1 with a noise branch that starts flat: an approximation.

        q' = 0, k' = k, lam = lambda_start:  A v - lambda_start (mean of all visible v)

    The head norm is left out and values keep their width, for both would change the scale. The
    deviation grows with `lambda_start`; `deviation` measures it.

    Args:
        config: of a llama, mistral, qwen2 or qwen3 model with default rotary positions.
        state: its state dict.
        lambda_start: lam of every layer at the start.
        seed: of the lambda vectors, which are equal, so that lam is `lambda_start` exactly and
            has a gradient.

    Returns:
        Configuration and state dict of `DiffTransformerForCausalLM`.

    Raises:
        UserError: as in `from_softmax_v2`.
    """
    if not math.isfinite(lambda_start):
        raise UserError(f"lambda-start: expected a finite number, got {lambda_start}")
    with reading_config():
        heads, groups = config.num_attention_heads, _groups(config)
        ours = DiffTransformerConfig(
            **shared_fields(config),
            attention="v1",
            match_heads=2 * heads,
            match_key_value_heads=2 * groups,
            head_norm=False,
            wide_values=False,
            lambda_start=lambda_start,
        )
    generator = torch.Generator().manual_seed(seed)
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            signal = tensor.unflatten(0, (heads, -1))
            pairs = torch.stack((signal, torch.zeros_like(signal)), dim=1)
            converted[name] = pairs.flatten(0, 2)
        elif ".k_proj." in name:
            key = tensor.unflatten(0, (groups, -1))
            converted[name] = torch.stack((key, key), dim=1).flatten(0, 2)
        else:
            converted[name] = tensor
        if name.endswith(".o_proj.weight"):
            vector = 0.1 * torch.randn(ours.query_width, generator=generator)
            for each in VECTORS:
                converted[name.replace("o_proj.weight", f"lam.{each}")] = vector.clone()
    check_tensors(config.model_type, converted, our_shapes(ours))
    return ours, converted


def stationary_layers(model: DiffTransformerForCausalLM, *, seed: int = 0) -> list[int]:
    """Layers whose noise branch no gradient reaches: training would leave it where it is.

    With noise queries and noise keys both zero each one's gradient is multiplied by the other;
    with lam and its vectors zero nothing moves lam either.

    Args:
        model: is run forward and backward on drawn tokens; its gradients are cleared.
        seed: of the tokens.

    Returns:
        Indices of differential layers in which noise queries and noise keys get no gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (2, 16), generator=generator)
    ids = ids.to(model.device)
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = [
        index
        for index, layer in enumerate(model.model.layers)
        if isinstance(layer.self_attn, DiffAttention) and not _noise_moves(layer.self_attn)
    ]
    model.zero_grad()
    return found


def refuse_stationary(model: DiffTransformerForCausalLM) -> None:
    """Refuse a start from which training cannot move the noise branch.

    Raises:
        UserError: `stationary_layers` finds any.
    """
    if layers := stationary_layers(model):
        raise UserError(
            f"checkpoint: in {len(layers)} layers, the first is {layers[0]}, no gradient reaches "
            "the noise branch (zero noise queries with zero noise keys, or lam = 0 with zero "
            "vectors): it would never train"
        )


def deviation(
    source: nn.Module, model: DiffTransformerForCausalLM, *, length: int = 64, seed: int = 0
) -> dict[str, float]:
    """How far a converted model is from its source on drawn tokens.

    Args:
        source: the plain model; called with `input_ids`, returns `logits`.
        model: the converted one.
        length: tokens of each of two sequences.
        seed: of the tokens.

    Returns:
        "max" and "rms" of the difference of the logits, "source_rms" of the source's.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    with torch.no_grad():
        want = source(input_ids=ids, use_cache=False).logits.float()
        gap = model(input_ids=ids, use_cache=False).logits.float() - want
    return {
        "max": gap.abs().max().item(),
        "rms": gap.square().mean().sqrt().item(),
        "source_rms": want.square().mean().sqrt().item(),
    }


def _noise_moves(attention: DiffAttention) -> bool:
    ratio, width = attention.sizes.ratio, attention.sizes.head_dim
    gradients = [attention.q_proj.weight.grad.unflatten(0, (-1, ratio + 1, width))[:, ratio]]  # pyright: ignore
    if attention.own_noise_key:
        gradients.append(attention.k_proj.weight.grad.unflatten(0, (-1, 2, width))[:, 1])  # pyright: ignore
    return any(gradient.abs().max() > 0 for gradient in gradients)


def _refuse_kind(kind: Any) -> None:
    if kind not in PLAIN_MODELS:
        raise UserError(f"model_type: expected one of {PLAIN_MODELS}, got {kind!r}")


def _groups(config: PreTrainedConfig) -> int:
    groups = config.num_key_value_heads
    return config.num_attention_heads if groups is None else groups


def shared_fields(config: PreTrainedConfig) -> Mapping[str, Any]:
    """Fields that our configuration takes over from a plain one.

    Raises:
        UserError: the source has what our model does not.
    """
    kind = config.model_type
    _refuse_kind(kind)
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"rope_type: our model has 'default', got {rope['rope_type']!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor: our model has 1, got {rope}")
    if config.hidden_act not in ("silu", "swish"):
        raise UserError(f"hidden_act: our model has silu, got {config.hidden_act!r}")
    if getattr(config, "mlp_bias", False):
        raise UserError("mlp_bias: our model has no biases there, got True")
    window = getattr(config, "sliding_window", None)
    if kind.startswith("qwen") and not getattr(config, "use_sliding_window", False):
        window = None
    width = getattr(config, "head_dim", None)
    if width is None:
        width = config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None)
    if types is not None and "sliding_attention" not in types:  # all of them see everything
        window = None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "match_head_dim": width,
        "qk_norm": kind == "qwen3",
        "attention_bias": kind == "qwen2" or bool(getattr(config, "attention_bias", False)),
        "attention_output_bias": False if kind == "qwen2" else None,
        "sliding_window": window,
        "layer_types": None if window is None else types,
        "rope_theta": float(rope.get("rope_theta", 10_000.0)),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "scale_embeddings": False,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
