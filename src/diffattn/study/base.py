"""The base model of an adaptation: a folder, or a name that `diffattn fetch` knows."""

import hashlib
import os
from pathlib import Path
from typing import Any

from diffattn.errors import UserError
from diffattn.study.smollm2 import default_folder


def base_folder(model: str | os.PathLike[str]) -> Path:
    """The folder of a base model.

    Args:
        model: a folder, or "smollm2" for the one that `diffattn fetch smollm2` made.

    Raises:
        UserError: the name was not fetched yet.
    """
    folder = Path(model)
    if folder.exists() or str(model) != "smollm2":
        return folder
    if not (default_folder() / "config.json").is_file():
        raise UserError("model: smollm2 is not there yet; run diffattn fetch smollm2")
    return default_folder()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of a model's weights ("model"), of its configuration and of its tokenizer."""
    return {
        "model": _digest(folder, "*.safetensors"),
        "configuration": _digest(folder, "config.json"),
        "tokenizer": tokenizer_digest(folder),
    }


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of the tokenizer in a model's folder; the weights are not read."""
    names = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json")
    return _digest(folder, *names)


def _digest(folder: Path, *patterns: str) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def check_positions(model: Any, **lengths: int) -> None:
    """Refuse sequences that are longer than a model has positions.

    Args:
        model: of transformers.
        **lengths: name of the setting -> tokens.

    Raises:
        UserError: one is too long.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, length in lengths.items():
        if limit is not None and length > limit:
            raise UserError(
                f"{name}: expected at most {limit}, the positions of the model, got {length}"
            )
