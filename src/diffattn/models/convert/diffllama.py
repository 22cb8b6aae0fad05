"""DiffLlama checkpoints, whole models, as ours and back."""

from typing import Any

from torch import Tensor
from transformers import DiffLlamaConfig

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.models.convert.config_errors import reading_config
from diffattn.models.convert.kept import refuse_lost
from diffattn.models.convert.layers import fold
from diffattn.models.convert.shapes import State, check_tensors, our_shapes
from diffattn.ops.layout import adjacent_to_half_split, half_split_to_adjacent


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
    ours = _our_config(config)
    check_tensors("diffllama", state, _diffllama_shapes(ours))
    width = ours.query_width
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
    config: DiffTransformerConfig, state: State, *, fold_gain: bool = True
) -> tuple[DiffLlamaConfig, dict[str, Tensor]]:
    """One of our V1 checkpoints as DiffLlama, the gain of the head norm folded into `o_proj`.

        W_O[:, h, c] <- W_O[:, h, c] gain[c]

    Args:
        config: of `DiffTransformerForCausalLM`, V1 in every layer.
        state: its state dict.
        fold_gain: whether a gain other than 1 is folded; else it is refused.

    Returns:
        Configuration and state dict of `transformers.DiffLlamaForCausalLM` with the same logits.

    Raises:
        UserError: DiffLlama would be read back as another model, or a tensor is missing, extra or
            of another shape; the message names the field or the tensor.
    """
    for layer in range(config.num_hidden_layers):
        if config.attention_kind(layer) != "v1":
            raise UserError(
                f"attention: DiffLlama holds v1 alone, but layer {layer} is "
                f"{config.attention_kind(layer)}"
            )
    with reading_config():
        theirs = DiffLlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size or 0,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.match_heads,
            num_key_value_heads=config.match_key_value_heads or config.match_heads,
            head_dim=config.query_width,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            lambda_std_dev=config.lambda_std,
            tie_word_embeddings=config.tie_word_embeddings and not config.scale_embeddings,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    folded = ("scale_embeddings", "tie_word_embeddings") if config.scale_embeddings else ()
    refuse_lost("DiffLlama", config, _our_config(theirs), besides=folded)
    check_tensors("diffattn", state, our_shapes(config))
    width = config.query_width
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            converted[name] = adjacent_to_half_split(tensor, width)
        elif name.endswith("o_proj.weight"):
            gain = state[name.replace("o_proj", "subln")]
            if not fold_gain and (gain != 1).any():
                raise UserError(
                    f"fold_gain: DiffLlama's head norm has no gain, and {name} is behind one"
                )
            converted[name] = fold(tensor, gain)
        elif name.endswith("embed_tokens.weight") and config.scale_embeddings:
            # DiffLlama does not scale embeddings: the scale goes into them, and the tie, if there
            # was one, comes undone
            converted.setdefault("lm_head.weight", tensor)
            converted[name] = tensor * config.hidden_size**0.5
        elif not name.endswith("subln.weight"):
            converted[name.replace("self_attn.lam.lambda_", "self_attn.lambda_")] = tensor
    return theirs, converted


def _our_config(config: DiffLlamaConfig) -> DiffTransformerConfig:
    _refuse_unknown(config)
    with reading_config():
        return DiffTransformerConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            attention="v1",
            match_heads=config.num_attention_heads,
            match_key_value_heads=config.num_key_value_heads,
            match_head_dim=config.head_dim,
            rope_theta=_rope_theta(config),
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            attention_dropout=config.attention_dropout or 0.0,
            initializer_range=config.initializer_range,
            scale_embeddings=False,
            lambda_std=0.1 if config.lambda_std_dev is None else config.lambda_std_dev,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )


def _refuse_unknown(config: DiffLlamaConfig) -> None:
    if config.attention_bias:
        raise UserError("attention_bias: our model has no biases, got True")
    if config.hidden_act not in ("silu", "swish"):
        raise UserError(f"hidden_act: our model has silu, got {config.hidden_act!r}")


def _rope_theta(config: DiffLlamaConfig) -> float:
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"rope_type: our model has 'default', got {rope['rope_type']!r}")
    return float(rope.get("rope_theta", 10_000.0))


def _diffllama_shapes(config: DiffTransformerConfig) -> dict[str, tuple[int, ...]]:
    return {
        name.replace("self_attn.lam.lambda_", "self_attn.lambda_"): shape
        for name, shape in our_shapes(config).items()
        if not name.endswith("subln.weight")
    }
