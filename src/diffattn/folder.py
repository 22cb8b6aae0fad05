"""Folders of long work: begun with settings, gone on with under the same ones."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffattn.errors import UserError
from diffattn.whole_file import write_json

SETTINGS = "settings.json"


@contextmanager
def begun(
    folder: Path,
    values: Mapping[str, Any],
    *,
    resume: bool,
    what: str,
    may_grow: tuple[str, ...] = (),
) -> Iterator[None]:
    """Begin a folder or go on with it; what a refused beginning wrote is taken away again.

    The block checks everything that can be wrong with the input.

    Args:
        folder: of the work.
        values: its settings, as JSON has them.
        resume: whether it may hold something.
        what: the work in words, as in "adaptation".
        may_grow: settings, numbers or lists, that may be more than they were.

    Yields:
        Nothing.

    Raises:
        UserError: the folder holds something else, other settings, or cannot be made.
    """
    values = json.loads(json.dumps(values))
    existed = folder.exists()
    is_new = not existed or (folder.is_dir() and not any(folder.iterdir()))
    if is_new:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out: {folder} cannot be made: {error.strerror}") from error
    else:
        _check_known(folder, values, resume, what, may_grow)
    write_json(folder / SETTINGS, values)
    try:
        yield
    except UserError:
        if is_new:
            shutil.rmtree(folder)
            if existed:
                folder.mkdir()
        raise


def _check_known(
    folder: Path, values: Mapping[str, Any], resume: bool, what: str, may_grow: tuple[str, ...]
) -> None:
    if not resume:
        raise UserError(f"out: expected a new folder, got {folder}; add --resume to go on with it")
    try:
        known = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        changed = sorted(
            n
            for n in values
            if known.get(n) != values[n] and not (n in may_grow and _grew(known[n], values[n]))
        )
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"out: {folder} holds no {what} that could go on") from error
    if changed:
        name = changed[0]
        raise UserError(
            f"{name}: expected {known.get(name)!r}, with which {folder} was begun, "
            f"got {values[name]!r}"
        )


def _grew(before: Any, now: Any) -> bool:
    return set(before) <= set(now) if isinstance(now, list) else before <= now


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a file that this package wrote.

    Args:
        path: of the file.
        kind: what it holds.

    Raises:
        UserError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, kind):
        raise UserError(f"out: {path} is damaged; delete it, and it is made again")
    return found


def check_same(path: Path, values: Mapping[str, Any], folder: Path) -> None:
    """Write what a folder's work rests on, or compare it with what was written.

    What was not written yet is added.

    Args:
        path: JSON file.
        values: name -> what it is now.
        folder: for the message.

    Raises:
        UserError: something is no longer what it was.
    """
    known = read_json(path) if path.exists() else {}
    for name, value in values.items():
        if known.get(name, value) != value:
            raise UserError(f"{name}: it is no longer the one that {folder} was begun with")
    write_json(path, {**known, **values})
