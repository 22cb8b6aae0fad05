"""Checkpoints that are as they were written, told from those that are not."""

import hashlib
import json
import logging
import os
import re
from pathlib import Path

MARKER = "complete.json"

_logger = logging.getLogger(__name__)


def mark_complete(folder: Path) -> None:
    """Record the files of a finished checkpoint with their SHA-256; the last thing written."""
    draft = folder / (MARKER + ".draft")
    sums = {
        str(path.relative_to(folder)): _checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MARKER, draft.name)
    }
    draft.write_text(json.dumps(sums), encoding="utf-8")
    os.replace(draft, folder / MARKER)


def is_complete(folder: Path) -> bool:
    """Whether every file that the marker names is there, byte for byte."""
    try:
        sums = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return all(_checksum(folder / name) == checksum for name, checksum in sums.items())
    except (OSError, ValueError, AttributeError):  # gone, torn, or not a table of checksums
        return False


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the most steps under `folder`, or None.

    A checkpoint that was finished and has changed since is passed over with a warning of this
    module's logger, which goes to standard error unless the program set up something else.
    """
    steps = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    for step in sorted(steps, reverse=True):
        if is_complete(steps[step]):
            return steps[step]
        if (steps[step] / MARKER).exists():
            _logger.warning(
                "%s is damaged; training goes on from the checkpoint before it, or from the start",
                steps[step],
            )
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
