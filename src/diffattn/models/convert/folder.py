"""Checkpoint folders, safetensors and config.json, written whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from diffattn.models.new_folder import new_folder

SHARD_BYTES = 5 * 2**30
COPIED = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "generation_config.json")


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
    with new_folder(path, "a conversion") as draft:
        _write_shards(draft, state)
        if copy_from is not None and Path(copy_from).is_dir():
            for pattern in COPIED:
                for file in Path(copy_from).glob(pattern):
                    if file.is_file():
                        shutil.copy(file, draft / file.name)
        # what makes a folder a checkpoint comes last
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
