"""A stock checkpoint from a base model and its adapter: `diffattn dex merge`."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffattn.dex import load, merge
from diffattn.dex.base import load_base
from diffattn.dex.storage import read_description
from diffattn.errors import UserError
from diffattn.models.new_folder import check_target, new_folder
from diffattn.models.quiet import without_progress_bars
from diffattn.study.base import base_folder

_TOKENS = 64
_DTYPES = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16")}
_COPIED = ("tokenizer*.json", "tokenizer.model", "vocab*", "merges.txt", "*.jinja")
_COPIED += ("special_tokens_map.json", "added_tokens.json", "generation_config.json")


def merge_checkpoint(
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    say: Callable[[str], None] = print,
) -> float:
    """Fold an adapter into its base and write a checkpoint that transformers loads by itself.

    The fold is done in fp32 and rounded once. In 16 bits rounding takes some of what was learned:
    small changes of a weight are below its last bit.

    Args:
        adapter: folder of `dex_config.json` and `dex_model.safetensors`.
        out: new folder; appears when it is whole.
        base: folder of the base model; None means the one that the adapter was trained on.
        dtype: of the checkpoint, "float32", "bfloat16" or "float16"; None means the base's.
        say: gets lines about the change of logits.

    Returns:
        The largest change of a logit by the fold, both sides in fp32.

    Raises:
        UserError: a folder is not what it should be, or `out` holds something.
    """
    check_target(out)
    described = read_description(adapter)
    source = base_folder(base if base is not None else described["base"]["name"] or ".")
    if dtype not in (None, *_DTYPES):
        raise UserError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    if base is None and not source.is_dir():
        raise UserError(f"base: expected the folder of the base model, not found: {source}")
    model = load_base(source)
    load(model, adapter)
    ids = torch.randint(
        model.config.get_text_config().vocab_size,
        (1, _TOKENS),
        generator=torch.Generator().manual_seed(0),
    )
    before = _logits(model, ids)
    merge(model)
    change = (_logits(model, ids) - before).abs().max().item()
    if not math.isfinite(change):
        raise UserError(f"adapter: {adapter} gives NaN or infinity; its training diverged")
    size = before.abs().max().item()
    say(f"largest change of a logit by the fold, in fp32: {change:.2e} (logits up to {size:.0f})")
    stored = _DTYPES[dtype] if dtype else _stored_dtype(source)
    if stored != torch.float32:
        # computed in fp32: what rounding the weights does, not what computing in 16 bits does
        rounded = (_logits(model.to(stored).float(), ids) - before).abs().max().item()
        model.to(stored)
        name = str(stored).removeprefix("torch.")
        say(f"by rounding the weights to {name}: {rounded:.2e}; --dtype float32 keeps all of it")
    with without_progress_bars():
        _write(model, source, out)
    say(f"stock checkpoint: {out}")
    return change


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def _stored_dtype(source: Path) -> torch.dtype:
    """The dtype of the largest tensor of a checkpoint."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 not a dictionary
                part = file.get_slice(name)
                size = 1
                for length in part.get_shape():
                    size *= length
                sizes[part.get_dtype()] = sizes.get(part.get_dtype(), 0) + size
    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return known.get(max(sizes, key=lambda kind: sizes[kind]), torch.float32)


def _write(model: Any, source: Path, target: str | os.PathLike[str]) -> None:
    with new_folder(target, "a merge") as draft:
        model.save_pretrained(draft)
        for pattern in _COPIED:
            for path in source.glob(pattern):
                if path.is_file() and not (draft / path.name).exists():
                    shutil.copyfile(path, draft / path.name)
