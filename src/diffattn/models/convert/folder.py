"""Checkpoint folders: safetensors and config.json, read whole, written whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffattn.errors import UserError

SHARD_BYTES = 5 * 2**30
COPIED = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "generation_config.json")


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a folder, or the tensors of one file.

    Args:
        path: a folder with `*.safetensors` (any number of shards) and, for whole models,
            config.json; or one safetensors file.

    Returns:
        The configuration, empty where there is none, and the state dict.

    Raises:
        UserError: nothing readable is there, or weights are pickled.
    """
    path = Path(path)
    if path.is_file():
        files, folder = [path], path.parent
        if path.suffix != ".safetensors":
            raise UserError(f"in: expected a folder or a .safetensors file, got {path}")
    elif path.is_dir():
        files, folder = sorted(path.glob("*.safetensors")), path
    else:
        raise UserError(f"in: expected a folder or a .safetensors file, got {path} (not there)")
    if not files:
        pickled = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
        held = f"only pickled weights ({pickled[0].name})" if pickled else "none"
        raise UserError(f"in: expected *.safetensors in {path}, got {held}")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state |= load_file(file)
        except SafetensorError as error:
            raise UserError(f"in: {file.name} is not a safetensors file ({error})") from error
    _check_index(folder, state)
    config: Any = {}
    if (folder / "config.json").is_file():
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"in: config.json is not JSON ({error})") from error
        if not isinstance(config, dict):
            raise UserError("in: expected an object in config.json")
    return config, state


def _check_index(folder: Path, state: Mapping[str, Tensor]) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}))
        if missing := sorted(listed - set(state)):
            raise UserError(f"in: a shard is missing; {missing[0]} is listed and not there")


def check_target(path: str | os.PathLike[str]) -> Path:
    """Refuse a target that holds something.

    Raises:
        UserError: it is a file or a folder that is not empty.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"out: expected a new or empty folder, got {path}")
    return path


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
        UserError: the folder holds something already.
    """
    target = check_target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write_shards(draft, state)
        if copy_from is not None and Path(copy_from).is_dir():
            for pattern in COPIED:
                for file in Path(copy_from).glob(pattern):
                    shutil.copy(file, draft / file.name)
        draft.chmod(0o755)
        if target.exists():
            target.rmdir()
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


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
