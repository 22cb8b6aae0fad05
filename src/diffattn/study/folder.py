"""Folders of long work: begun with settings, gone on with under the same ones."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffattn.errors import UserError
from diffattn.json_file import write_json

SETTINGS = "settings.json"


def claim(folder: Path, values: Mapping[str, Any], *, resume: bool, what: str) -> None:
    """Begin a folder, or check that it was begun with these settings.

    Args:
        folder: of the work.
        values: its settings, as JSON has them.
        resume: whether it may hold something.
        what: the work in words, as in "adaptation".

    Raises:
        UserError: the folder holds something else, other settings, or cannot be made.
    """
    values = json.loads(json.dumps(values))
    path = folder / SETTINGS
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out: {folder} cannot be made: {error.strerror}") from error
        write_json(path, values)
        return
    if not resume:
        raise UserError(f"out: expected a new folder, got {folder}; add --resume to go on with it")
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(n for n in values if known.get(n) != values[n])
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"out: {folder} holds no {what} that could go on") from error
    if changed:
        name = changed[0]
        raise UserError(
            f"{name}: expected {known.get(name)!r}, with which {folder} was begun, "
            f"got {values[name]!r}"
        )


def check_same(path: Path, values: Mapping[str, Any], folder: Path) -> None:
    """Write what a folder's work rests on, or compare it with what was written.

    Args:
        path: JSON file.
        values: name -> what it is now.
        folder: for the message.

    Raises:
        UserError: something is no longer what it was.
    """
    if not path.exists():
        write_json(path, dict(values))
        return
    known = json.loads(path.read_text(encoding="utf-8"))
    for name, value in values.items():
        if known.get(name) != value:
            raise UserError(f"{name}: it is no longer the one that {folder} was begun with")


@contextmanager
def held(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock file inside the block; it is free again when its process ends, however it ends.

    Args:
        path: of the lock file.
        wait: until another process gives it back.

    Yields:
        Whether the lock is held; always True with `wait`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
