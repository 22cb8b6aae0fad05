"""Checkpoint folders, safetensors and config.json, written whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diffattn.errors import UserError

SHARD_BYTES = 5 * 2**30
UNFINISHED = "unfinished.txt"
"""lies in a folder until all else does"""
COPIED = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "generation_config.json")


def check_target(path: str | os.PathLike[str]) -> Path:
    """Refuse a target that holds something, or where no folder can be.

    Returns:
        Its absolute path, links followed: what a link names is written, the link stays.

    Raises:
        UserError: it is a file, a folder that is not empty, lies below a file, or is the working
            folder, which no other may replace.
    """
    try:
        target = Path(path).resolve()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"out: expected a new or empty folder, got {path}")
        above = next(folder for folder in target.parents if folder.exists())
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long, no permission
        raise UserError(f"out: expected a new or empty folder, got {path} ({error})") from error
    if not above.is_dir():
        raise UserError(f"out: expected a new or empty folder, got {path}, and {above} is a file")
    if target == Path.cwd():
        raise UserError(f"out: expected a folder other than the working folder, got {path}")
    return target


def write_checkpoint(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    copy_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write a checkpoint beside its place and move it there when it is whole.

    Args:
        path: a folder that is not there, or empty.
        config: becomes config.json.
        state: becomes model.safetensors, in shards of at most 5 GiB.
        copy_from: folder whose tokenizer and generation settings come along.

    Raises:
        UserError: the folder holds something, also if it came meanwhile, or cannot be written.
    """
    target = check_target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _write_draft(draft, config, state, copy_from)
            if target.exists():
                target.rmdir()
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise UserError(f"out: {path} cannot be written ({error})") from error


def _write_draft(
    draft: Path,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    copy_from: str | os.PathLike[str] | None,
) -> None:
    """Write what makes a folder a checkpoint last."""
    marker = draft / UNFINISHED
    marker.write_text("a conversion was stopped here; this folder can be deleted\n")
    _write_shards(draft, state)
    if copy_from is not None and Path(copy_from).is_dir():
        for pattern in COPIED:
            for file in Path(copy_from).glob(pattern):
                if file.is_file():
                    shutil.copy(file, draft / file.name)
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    draft.chmod(0o755)
    marker.unlink()


def _write_shards(folder: Path, state: Mapping[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if shards[-1] and size + bytes_ > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.clone().contiguous()  # tensors may share memory
        size += bytes_
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
