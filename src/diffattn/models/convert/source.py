"""Checkpoint folders read whole: config.json and the safetensors that belong to it."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diffattn.errors import UserError
from diffattn.models.new_folder import UNFINISHED

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a folder, or the tensors of one file.

    Args:
        path: a folder with model.safetensors, or the shards that its index names, or else
            `*.safetensors` that share no tensor, and, for whole models, config.json; or one
            safetensors file.

    Returns:
        The configuration, empty where there is none, and the state dict.

    Raises:
        UserError: nothing readable is there, weights are pickled, a tensor is there twice, or the
            folder is what a stopped conversion left.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".safetensors":
        folder = path.parent
    elif path.is_dir():
        folder = path
    else:
        held = "" if path.is_file() else " (not there)"
        raise UserError(f"in: expected a folder or a .safetensors file, got {path}{held}")
    if (folder / UNFINISHED).exists():
        raise UserError(f"in: {folder} is what a stopped conversion left; convert again, delete it")
    files, listed = ([path], set()) if folder != path else _files(folder)
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise UserError(f"in: {file.name} is not a safetensors file ({error})") from error
        except OSError as error:
            raise UserError(f"in: {file.name} cannot be read ({error})") from error
        if twice := sorted(set(tensors) & set(state)):
            raise UserError(f"in: expected each tensor once, got {twice[0]} in {file.name} again")
        state |= tensors
    if missing := sorted(listed - set(state)):
        raise UserError(f"in: a shard is missing; {missing[0]} is listed and not there")
    config = _read_object(folder / "config.json") if (folder / "config.json").exists() else {}
    return config, state


def _files(folder: Path) -> tuple[list[Path], set[str]]:
    """Files of the weights, and the names of tensors that they must hold."""
    if (folder / INDEX).exists():
        weight_map = _read_object(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise UserError(f"in: {INDEX}: expected names of files in weight_map")
        names = set(weight_map.values())
        if (folder / WEIGHTS).exists() and WEIGHTS not in names:
            raise UserError(f"in: expected {WEIGHTS} or shards with an index, got both in {folder}")
        listed = [folder / name for name in sorted(names) if (folder / name).exists()]
        return listed, set(weight_map)
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS], set()
    if files := sorted(folder.glob("*.safetensors")):
        return files, set()
    pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    held = f"only pickled weights ({pickled[0].name})" if pickled else "none"
    raise UserError(f"in: expected *.safetensors in {folder}, got {held}")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"in: {file.name} is not JSON ({error})") from error
    except OSError as error:
        raise UserError(f"in: {file.name} cannot be read ({error})") from error
    if not isinstance(read, dict):
        raise UserError(f"in: expected an object in {file.name}")
    return read
