"""Checkpoints that were written to the end, told from those that were not."""

import json
import os
import re
from pathlib import Path

MARKER = "complete.json"


def mark_complete(folder: Path) -> None:
    """Record the files of a finished checkpoint with their sizes; the last thing written."""
    sizes = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    }
    draft = folder / (MARKER + ".draft")
    draft.write_text(json.dumps(sizes), encoding="utf-8")
    os.replace(draft, folder / MARKER)


def is_complete(folder: Path) -> bool:
    """Whether every file that the marker names is there in its full size."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):  # gone, torn, or not a table of sizes
        return False


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the most steps under `folder`, or None."""
    steps = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and is_complete(path)
    }
    return steps[max(steps)] if steps else None
