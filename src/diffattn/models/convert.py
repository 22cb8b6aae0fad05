"""Checkpoints of other differential models, converted tensor by tensor.

A layout is a published arrangement of heads, rotary channels and names. Conversions move rows and
names and, where the target has no gain in its head norm, fold the gain into the output
projection; nothing is trained or approximated.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DiffLlamaConfig

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.ops.layout import adjacent_to_half_split, half_split_to_adjacent

State = Mapping[str, Tensor]


def from_diffllama(
    config: DiffLlamaConfig, state: State
) -> tuple[DiffTransformerConfig, dict[str, Tensor]]:
    """A DiffLlama checkpoint as ours: half-split pairs become adjacent pairs.

    DiffLlama pairs query head i with i + half, and likewise keys and the two halves of a value;
    its head norm has no gain, which is a gain of 1 here.

    Args:
        config: of `transformers.DiffLlamaForCausalLM`.
        state: its state dict.

    Returns:
        Configuration and state dict of `DiffTransformerForCausalLM` with the same logits.

    Raises:
        UserError: the configuration says something that our model does not have, or a tensor is
            missing, extra or of another shape; the message names it.

    Source: transformers, `models/diffllama/modeling_diffllama.py`.
    """
    _refuse_unknown(config)
    ours = DiffTransformerConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        attention="v1",
        match_heads=config.num_attention_heads,
        match_key_value_heads=config.num_key_value_heads,
        rope_theta=_rope_theta(config),
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
        scale_embeddings=False,
        lambda_std=0.1 if config.lambda_std_dev is None else config.lambda_std_dev,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    _check_tensors("diffllama", state, _diffllama_shapes(ours))
    width = ours.hidden_size // ours.match_heads
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            converted[name] = half_split_to_adjacent(tensor, width)
        else:
            converted[name.replace("self_attn.lambda_", "self_attn.lam.lambda_")] = tensor
    for layer in range(ours.num_hidden_layers):
        like = state[f"model.layers.{layer}.self_attn.lambda_q1"]
        converted[f"model.layers.{layer}.self_attn.subln.weight"] = like.new_ones(2 * width)
    return ours, converted


def to_diffllama(
    config: DiffTransformerConfig, state: State
) -> tuple[DiffLlamaConfig, dict[str, Tensor]]:
    """One of our V1 checkpoints as DiffLlama, the gain of the head norm folded into `o_proj`.

        W_O[:, h, c] <- W_O[:, h, c] gain[c]

    Args:
        config: of `DiffTransformerForCausalLM`, V1 in every layer.
        state: its state dict.

    Returns:
        Configuration and state dict of `transformers.DiffLlamaForCausalLM` with the same logits.

    Raises:
        UserError: a layer is not V1, lambda_init is a constant, or a tensor is missing, extra or of
            another shape; the message names it.
    """
    for layer in range(config.num_hidden_layers):
        if config.attention_kind(layer) != "v1":
            raise UserError(
                f"attention: DiffLlama holds v1 alone, but layer {layer} is "
                f"{config.attention_kind(layer)}"
            )
    if config.lambda_start is not None:
        raise UserError(
            "lambda_start: DiffLlama has the depth schedule alone, got the constant "
            f"{config.lambda_start}"
        )
    _check_tensors("diffattn", state, _our_shapes(config))
    theirs = DiffLlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size or 0,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.match_heads,
        num_key_value_heads=config.match_key_value_heads or config.match_heads,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        lambda_std_dev=config.lambda_std,
        tie_word_embeddings=config.tie_word_embeddings and not config.scale_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    width = config.hidden_size // config.match_heads
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            converted[name] = adjacent_to_half_split(tensor, width)
        elif name.endswith("o_proj.weight"):
            gain = state[name.replace("o_proj", "subln")]
            converted[name] = (tensor.unflatten(1, (-1, 2 * width)) * gain.to(tensor)).flatten(1)
        elif name.endswith("embed_tokens.weight") and config.scale_embeddings:
            # DiffLlama does not scale embeddings: the scale goes into them, and the tie, if there
            # was one, comes undone
            converted.setdefault("lm_head.weight", tensor)
            converted[name] = tensor * config.hidden_size**0.5
        elif not name.endswith("subln.weight"):
            converted[name.replace("self_attn.lam.lambda_", "self_attn.lambda_")] = tensor
    return theirs, converted


def _refuse_unknown(config: DiffLlamaConfig) -> None:
    if config.attention_bias:
        raise UserError("attention_bias: our model has no biases, got True")
    if config.hidden_act not in ("silu", "swish"):
        raise UserError(f"hidden_act: our model has silu, got {config.hidden_act!r}")
    expected = config.hidden_size // config.num_attention_heads
    if config.head_dim != expected:
        raise UserError(
            f"head_dim: expected hidden_size / num_attention_heads = {expected}, got "
            f"{config.head_dim}"
        )


def _rope_theta(config: DiffLlamaConfig) -> float:
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"rope_type: our model has 'default', got {rope['rope_type']!r}")
    return float(rope.get("rope_theta", 10_000.0))


def _our_shapes(config: DiffTransformerConfig) -> dict[str, tuple[int, ...]]:
    shapes = _diffllama_shapes(config)
    width = config.hidden_size // config.match_heads
    ours = {
        name.replace("self_attn.lambda_", "self_attn.lam.lambda_"): shape
        for name, shape in shapes.items()
    }
    for layer in range(config.num_hidden_layers):
        ours[f"model.layers.{layer}.self_attn.subln.weight"] = (2 * width,)
    return ours


def _diffllama_shapes(config: DiffTransformerConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of these sizes has, a tied output layer excepted."""
    hidden, inner = config.hidden_size, config.intermediate_size or 0
    width = hidden // config.match_heads
    key_rows = width * (config.match_key_value_heads or config.match_heads)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (key_rows, hidden),
            prefix + "self_attn.v_proj.weight": (key_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
        for vector in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            shapes[f"{prefix}self_attn.{vector}"] = (width,)
    return shapes


def _check_tensors(layout: str, state: State, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint whose layout is not what its label says."""
    optional = {"lm_head.weight"}
    if missing := sorted(set(shapes) - set(state)):
        raise UserError(f"checkpoint: {layout} lacks {missing[0]} ({len(missing)} missing)")
    if extra := sorted(set(state) - set(shapes) - optional):
        raise UserError(f"checkpoint: {layout} has no tensor {extra[0]} ({len(extra)} too many)")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise UserError(
                f"checkpoint: expected {name} of shape {shape}, got {tuple(state[name].shape)}"
            )
