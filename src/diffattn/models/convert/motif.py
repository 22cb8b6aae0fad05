"""Motif-2.6B (V1) and Motif-2-12.7B (grouped), whole models, as ours and back."""

from typing import Any

from torch import Tensor

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.models.convert.config_errors import reading_config
from diffattn.models.convert.kept import refuse_lost
from diffattn.models.convert.shapes import State, check_tensors, our_shapes

SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_dropout",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def from_motif(
    config: dict[str, Any], state: State
) -> tuple[DiffTransformerConfig, dict[str, Tensor]]:
    """A Motif checkpoint as ours: the same rows under our names, lambda_init of layer l - 1.

    Args:
        config: the checkpoint's config.json. With `num_noise_heads` it is grouped (12.7B): query
            heads in stripes of [r signal, 1 noise]; without, V1 (2.6B): adjacent pairs.
        state: its state dict.

    Returns:
        Configuration and state dict of `DiffTransformerForCausalLM` with the same logits.

    Raises:
        UserError: the configuration says something that our model does not have, or a tensor is
            missing, extra or of another shape; the message names it.

    Source: Lim et al., arXiv 2508.09148 (2.6B) and 2510.06949 (grouped); layouts as in two
        independent ports, which agree on the offset l - 1.
    """
    ours = _our_config(config)
    converted = {
        name.replace(".self_attn.lambda_", ".self_attn.lam.lambda_"): tensor
        for name, tensor in state.items()
    }
    layout = "motif2" if config.get("num_noise_heads") else "motif"
    check_tensors(layout, converted, our_shapes(ours))
    return ours, converted


def to_motif(
    config: DiffTransformerConfig, state: State
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One of our checkpoints as Motif's: V1 as 2.6B, grouped as 12.7B.

    Args:
        config: of `DiffTransformerForCausalLM`.
        state: its state dict.

    Returns:
        config.json and state dict.

    Raises:
        UserError: Motif would be read back as another model, or a tensor is missing, extra or of
            another shape; the message names the field or the tensor.
    """
    kinds = {config.attention_kind(layer) for layer in range(config.num_hidden_layers)}
    if len(kinds) != 1 or not kinds <= {"v1", "grouped"}:
        raise UserError(f"attention: Motif holds v1 or grouped in all layers, got {sorted(kinds)}")
    sizes, eps = config.diff_sizes(0), config.head_norm_eps
    theirs: dict[str, Any] = {
        "model_type": "Motif",
        "architectures": ["MotifForCausalLM"],
        **{name: getattr(config, name) for name in SAME},
        "num_key_value_heads": 2 * sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": config.hidden_act,
        "rope_theta": config.rope_theta,
        "attn_rms_norm_eps": config.rms_norm_eps if eps is None else eps,
        "use_bias": False,
    }
    if kinds == {"grouped"}:
        theirs["num_attention_heads"] = sizes.num_diff_heads + sizes.num_noise_heads
        theirs["num_noise_heads"] = sizes.num_noise_heads
    else:
        theirs["num_attention_heads"] = 2 * sizes.num_diff_heads
    refuse_lost("Motif", config, _our_config(theirs))
    check_tensors("diffattn", state, our_shapes(config))
    converted = {
        name.replace(".self_attn.lam.lambda_", ".self_attn.lambda_"): tensor
        for name, tensor in state.items()
    }
    return theirs, converted


def _our_config(config: dict[str, Any]) -> DiffTransformerConfig:
    for name, allowed in (
        ("use_bias", (False, None)),
        ("rope_scaling", (None,)),
        ("k_ratio", (1, None)),
        ("use_sliding_window", (False, None)),
        ("hidden_act", ("poly_norm", "silu")),
    ):
        if config.get(name, allowed[0]) not in allowed:
            raise UserError(f"{name}: our model has {allowed[0]!r}, got {config[name]!r}")
    with reading_config():
        fields = {name: config[name] for name in SAME if config.get(name) is not None}
        heads, noise = _take(config, "num_attention_heads"), config.get("num_noise_heads")
        groups = config.get("num_key_value_heads", heads)
        if noise:
            signal = heads - noise
            if signal % noise:
                raise UserError(f"num_noise_heads: {noise} do not divide {signal} signal heads")
            fields |= {
                "attention": "grouped",
                "match_heads": 2 * signal,
                "noise_ratio": signal // noise,
            }
        else:
            fields |= {"attention": "v1", "match_heads": heads}
        return DiffTransformerConfig(
            **fields,
            match_key_value_heads=groups,
            match_head_dim=config.get("head_dim"),
            hidden_act=config.get("hidden_act", "poly_norm"),
            rope_theta=config.get("rope_theta", 10_000.0),
            head_norm_eps=config.get("attn_rms_norm_eps", 1e-5),
            lambda_layer_offset=-1,
            scale_embeddings=False,
        )


def _take(config: dict[str, Any], name: str) -> int:
    if not isinstance(config.get(name), int):
        raise UserError(f"{name}: expected a whole number in config.json, got {config.get(name)!r}")
    return config[name]
