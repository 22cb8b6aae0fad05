"""Which layout a checkpoint has, by its configuration and the names of its tensors."""

from collections.abc import Mapping
from typing import Any

from diffattn.errors import UserError
from diffattn.models.convert.layers import LAYER_LAYOUTS, State, layers_of

WHOLE_MODELS = ("diffllama", "motif", "motif2")
LAYOUTS = ("diffattn", *WHOLE_MODELS, *(name for name in LAYER_LAYOUTS if name != "diffattn"))
ROTARY = ("half", "interleaved", "none")


def detect(config: Mapping[str, Any], state: State) -> str:
    """Name of the layout.

    Args:
        config: config.json, or empty.
        state: the state dict.

    Returns:
        One of `LAYOUTS`.

    Raises:
        UserError: names and shapes fit none, or more than one; half-split and adjacent pairs,
            rotary styles and the offset of lambda_init leave no trace in a shape.
    """
    _refuse_said(config)
    model = str(config.get("model_type", "")).lower()
    if model == "diff_transformer" or "layout" in config:
        return config.get("layout", "diffattn")
    if model == "diffllama":
        return "diffllama"
    if model == "motif":
        return "motif2" if config.get("num_noise_heads") else "motif"
    if any(".lam.lambda_" in name or name.startswith("lam.lambda_") for name in state):
        return "diffattn"
    found = [name for name in LAYER_LAYOUTS if name != "diffattn" and layers_of(state, name)]
    if len(found) == 1:
        return found[0]
    if not found and any(name.endswith("self_attn.lambda_q1") for name in state):
        raise UserError(
            "from: DiffLlama's half-split pairs, Motif's adjacent pairs and their offsets of "
            "lambda_init have the same shapes; without config.json name --from diffllama or motif"
        )
    raise UserError(f"from: expected tensors of one of {LAYOUTS}, found those of {found or 'none'}")


def check_label(source: str, config: Mapping[str, Any], state: State) -> None:
    """Refuse a label that the configuration contradicts.

    Raises:
        UserError: config.json says another layout, or `source` is none.
    """
    _refuse_said(config)
    if source not in LAYOUTS:
        raise UserError(f"from: expected 'auto' or one of {LAYOUTS}, got {source!r}")
    if config.get("model_type") or config.get("layout"):
        try:
            said = detect(config, state)
        except UserError:
            return
        if said != source:
            raise UserError(f"from: {source} was named, but the checkpoint is {said}")


def _refuse_said(config: Mapping[str, Any]) -> None:
    for name, allowed in (("layout", LAYOUTS), ("rotary", ROTARY)):
        if name in config and config[name] not in allowed:
            raise UserError(
                f"in: config.json: {name}: expected one of {allowed}, got {config[name]!r}"
            )
