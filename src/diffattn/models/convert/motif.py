"""Motif-2.6B (V1) and Motif-2-12.7B (grouped), whole models, as ours and back."""

from typing import Any

from torch import Tensor

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.models.convert.shapes import State, check_tensors, our_shapes

SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "rms_norm_eps",
    "max_position_embeddings",
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
    for name, allowed in (
        ("use_bias", (False, None)),
        ("rope_scaling", (None,)),
        ("k_ratio", (1, None)),
        ("use_sliding_window", (False, None)),
        ("hidden_act", ("poly_norm", "silu")),
    ):
        if config.get(name, allowed[0]) not in allowed:
            raise UserError(f"{name}: our model has {allowed[0]!r}, got {config[name]!r}")
    fields = {name: config[name] for name in SAME if name in config}
    heads, noise = _take(config, "num_attention_heads"), config.get("num_noise_heads")
    groups = config.get("num_key_value_heads", heads)
    if noise:
        if (heads - noise) % noise:
            raise UserError(f"num_noise_heads: {noise} do not divide {heads - noise} signal heads")
        fields |= {
            "attention": "grouped",
            "match_heads": 2 * (heads - noise),
            "noise_ratio": (heads - noise) // noise,
        }
    else:
        fields |= {"attention": "v1", "match_heads": heads}
    ours = DiffTransformerConfig(
        **fields,
        match_key_value_heads=groups,
        match_head_dim=config.get("head_dim"),
        hidden_act=config.get("hidden_act", "poly_norm"),
        rope_theta=config.get("rope_theta", 10_000.0),
        head_norm_eps=config.get("attn_rms_norm_eps", 1e-5),
        lambda_layer_offset=-1,
        scale_embeddings=False,
    )
    converted = {
        name.replace(".self_attn.lambda_", ".self_attn.lam.lambda_"): tensor
        for name, tensor in state.items()
    }
    check_tensors("motif2" if noise else "motif", converted, our_shapes(ours))
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
        UserError: Motif cannot hold what the configuration says; the message names the field.
    """
    kinds = {config.attention_kind(layer) for layer in range(config.num_hidden_layers)}
    if len(kinds) != 1 or not kinds <= {"v1", "grouped"}:
        raise UserError(f"attention: Motif holds v1 or grouped in all layers, got {sorted(kinds)}")
    for name, wanted in (
        ("lambda_layer_offset", -1),
        ("lambda_start", None),
        ("scale_embeddings", False),
        ("qk_norm", False),
        ("attention_sink", False),
        ("attention_softcap", None),
        ("attention_bias", False),
        ("sliding_window", None),
    ):
        if getattr(config, name) != wanted:
            raise UserError(f"{name}: Motif has {wanted!r} alone, got {getattr(config, name)!r}")
    check_tensors("diffattn", state, our_shapes(config))
    sizes = config.diff_sizes(0)
    theirs: dict[str, Any] = {
        "model_type": "Motif",
        "architectures": ["MotifForCausalLM"],
        **{name: getattr(config, name) for name in SAME},
        "num_key_value_heads": 2 * sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": config.hidden_act,
        "rope_theta": config.rope_theta,
        "attn_rms_norm_eps": config.head_norm_eps or config.rms_norm_eps,
        "use_bias": False,
    }
    if kinds == {"grouped"}:
        theirs["num_attention_heads"] = sizes.num_diff_heads + sizes.num_noise_heads
        theirs["num_noise_heads"] = sizes.num_noise_heads
    else:
        theirs["num_attention_heads"] = 2 * sizes.num_diff_heads
    converted = {
        name.replace(".self_attn.lam.lambda_", ".self_attn.lambda_"): tensor
        for name, tensor in state.items()
    }
    return theirs, converted


def _take(config: dict[str, Any], name: str) -> int:
    if not isinstance(config.get(name), int):
        raise UserError(f"{name}: expected a whole number in config.json, got {config.get(name)!r}")
    return config[name]
