"""The base model of an adaptation: a folder, or a name that `diffattn fetch` knows."""

import hashlib
import os
from pathlib import Path

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


def weights_digest(folder: Path) -> str:
    """SHA-256 over the safetensors files of a folder, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
