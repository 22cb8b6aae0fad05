"""Checkpoints of other differential models, and of plain ones, converted tensor by tensor."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers import DiffLlamaConfig

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.models.convert.config_errors import reading_config
from diffattn.models.convert.detect import LAYOUTS, WHOLE_MODELS, check_label, detect
from diffattn.models.convert.diffllama import from_diffllama, to_diffllama
from diffattn.models.convert.folder import write_checkpoint
from diffattn.models.convert.kept import refuse_lost
from diffattn.models.convert.layers import LAYER_LAYOUTS, State, Tensors, convert_layers
from diffattn.models.convert.motif import from_motif, to_motif
from diffattn.models.convert.our_config import our_config
from diffattn.models.convert.shapes import check_tensors, our_shapes
from diffattn.models.convert.softmax import (
    deviation,
    from_softmax_v1,
    from_softmax_v2,
    plain_config,
    plain_model,
    refuse_stationary,
    stationary_layers,
)
from diffattn.models.convert.source import read_checkpoint
from diffattn.models.flops import training_flops_per_token
from diffattn.models.modeling_diff import DiffTransformerForCausalLM
from diffattn.models.new_folder import check_target

__all__ = [
    "LAYOUTS",
    "convert_checkpoint",
    "convert_layers",
    "detect",
    "deviation",
    "from_diffllama",
    "from_motif",
    "from_softmax_v1",
    "from_softmax_v2",
    "refuse_stationary",
    "start_from_softmax",
    "stationary_layers",
    "to_diffllama",
    "to_motif",
]

Path = str | os.PathLike[str]
Say = Callable[[str], None]

FOLDED = ("unilm-v1", "diffllama")
OF_WHOLE_MODELS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "hidden_act",
    "match_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "scale_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""fields that no attention layer has, or that its tensors' shapes hold"""


def convert_checkpoint(
    source: Path,
    target: Path,
    *,
    from_layout: str = "auto",
    to_layout: str = "diffattn",
    fold_gain: bool = False,
    say: Say = print,
) -> None:
    """Convert a checkpoint folder from one layout to another.

    Args:
        source: folder (or safetensors file) to read.
        target: new folder to write; it appears when it is whole.
        from_layout: one of `LAYOUTS`, or "auto".
        to_layout: one of `LAYOUTS`.
        fold_gain: fold the head norm's gain into the output projection of "unilm-v1", which can
            be built without one; for "diffllama", which has none, it is folded anyway.
        say: takes lines of progress.

    Raises:
        UserError: the checkpoint is not of that layout, the target layout cannot hold it, it has
            no gain to fold, or the target folder holds something; the message names what it is
            about.
    """
    check_target(target)
    config, state = read_checkpoint(source)
    if from_layout == "auto":
        from_layout = detect(config, state)
        say(f"layout of {source}: {from_layout}")
    check_label(from_layout, config, state)
    if to_layout not in LAYOUTS:
        raise UserError(f"to: expected one of {LAYOUTS}, got {to_layout!r}")
    if to_layout == from_layout:
        raise UserError(f"to: the checkpoint is {to_layout} already")
    if fold_gain and to_layout not in FOLDED:
        raise UserError(f"fold-gain: expected a target of {FOLDED}, got {to_layout}")
    ours, state = _to_ours(config, state, from_layout, to_layout, fold_gain)
    written, state = _from_ours(ours, state, to_layout, fold_gain)
    write_checkpoint(target, written, state, copy_from=source)
    say(f"wrote {len(state)} tensors of the layout {to_layout} to {target}")


def start_from_softmax(
    source: Path, target: Path, kind: str, *, lambda_start: float | None = None, say: Say = print
) -> dict[str, float]:
    """Start a differential model from a plain one and write it, with what the start changes.

    Args:
        source: folder of a llama, mistral, qwen2 or qwen3 model.
        target: new folder to write.
        kind: "v2" (exact) or "v1" (approximate).
        lambda_start: lam of every layer at the start of "v1", which alone has one; None means 0.2.
        say: takes the lines that tell size, cost and deviation, before anything is written.

    Returns:
        What `deviation` measures.

    Raises:
        UserError: the source cannot be held, the start is a stationary point, or the target
            folder holds something.
    """
    check_target(target)
    if kind not in ("v1", "v2"):
        raise UserError(f"from-softmax: expected 'v1' or 'v2', got {kind!r}")
    if kind == "v2" and lambda_start is not None:
        raise UserError(f"lambda-start: expected with from-softmax v1 alone, got {lambda_start}")
    read, weights = read_checkpoint(source)
    plain = plain_config(read)
    if kind == "v2":
        config, state = from_softmax_v2(plain, weights)
    else:
        start = 0.2 if lambda_start is None else lambda_start
        config, state = from_softmax_v1(plain, weights, lambda_start=start)
    model = DiffTransformerForCausalLM(config).eval()
    missing = model.load_state_dict(_without_tied(config, state), strict=False).missing_keys
    if set(missing) - {"lm_head.weight"}:
        raise UserError(f"checkpoint: lacks {sorted(missing)[0]}")
    before: Any = plain_model(plain, weights).eval().float()
    parameters = [sum(p.numel() for p in each.parameters()) for each in (before, model)]
    say(f"parameters: {parameters[0]:,} before, {parameters[1]:,} now")
    say(f"FLOPs of a training token at 2,048: {training_flops_per_token(model, 2048):.3g} now")
    measured = deviation(before, model)
    say(
        f"deviation of the logits on drawn tokens: largest {measured['max']:.3g}, RMS "
        f"{measured['rms']:.3g}, where the source's RMS is {measured['source_rms']:.3g}"
    )
    refuse_stationary(model)
    written, state = _from_ours(config, state, "diffattn", False)
    write_checkpoint(target, written, state, copy_from=source)
    say(f"wrote a {kind} model to {target}")
    return measured


def _to_ours(
    config: dict[str, Any], state: Tensors, layout: str, target: str, fold_gain: bool
) -> tuple[DiffTransformerConfig | dict[str, Any], Tensors]:
    if layout == "diffllama":
        with reading_config():
            theirs = DiffLlamaConfig(**config)
        return from_diffllama(theirs, state)
    if layout in ("motif", "motif2"):
        return from_motif(config, state)
    if config.get("model_type") == "diff_transformer":
        ours = our_config(config)
        check_tensors("diffattn", state, our_shapes(ours))
        return ours, state
    if target in WHOLE_MODELS:
        raise UserError(f"to: {target} is a whole model, and {layout} holds attention layers alone")
    rotary = config.get("rotary", LAYER_LAYOUTS[layout].rotary)
    _check_rotary(layout, rotary, target)
    rotary = rotary if rotary == "none" else "half"
    return {"rotary": rotary}, convert_layers(state, layout, "diffattn")


def _from_ours(
    config: DiffTransformerConfig | dict[str, Any], state: Tensors, layout: str, fold_gain: bool
) -> tuple[Mapping[str, Any], Tensors]:
    if isinstance(config, DiffTransformerConfig):
        if layout == "diffattn":
            config.architectures = ["DiffTransformerForCausalLM"]
            return config.to_diff_dict(), _without_tied(config, state)
        if layout == "diffllama":
            theirs, state = to_diffllama(config, state)
            theirs.architectures = ["DiffLlamaForCausalLM"]
            return theirs.to_diff_dict(), state
        if layout in ("motif", "motif2"):
            theirs, state = to_motif(config, state)
            if (got := detect(theirs, state)) != layout:
                raise UserError(f"to: this model is {got}, got {layout}")
            return theirs, state
        _check_rotary("diffattn", "half", layout)
        _check_layers(config, layout)
    written = {"layout": layout, "rotary": LAYER_LAYOUTS[layout].rotary}
    if layout == "diffattn" and not isinstance(config, DiffTransformerConfig):
        written["rotary"] = config["rotary"]
    return written, convert_layers(state, "diffattn", layout, fold_gain=fold_gain)


def _check_layers(config: DiffTransformerConfig, layout: str) -> None:
    """Refuse what the published layer does not do; its heads are checked with its tensors."""
    published = DiffTransformerConfig(
        num_hidden_layers=config.num_hidden_layers,
        attention="v2" if layout == "unilm-v2" else "v1",
        head_norm_eps=1e-5,
    )
    refuse_lost(layout, config, published, besides=OF_WHOLE_MODELS)


def _check_rotary(layout: str, rotary: str, target: str) -> None:
    wanted = LAYER_LAYOUTS[target].rotary if target in LAYER_LAYOUTS else "half"
    if target != "diffattn" and (rotary == "none") != (wanted == "none"):
        raise UserError(
            f"to: {layout} rotates queries and keys ({rotary}), {target} does not match ({wanted})"
        )


def _without_tied(config: DiffTransformerConfig, state: State) -> Tensors:
    return {
        name: tensor
        for name, tensor in state.items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
