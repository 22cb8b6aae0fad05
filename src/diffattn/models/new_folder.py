"""Folders that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from diffattn.errors import UserError

UNFINISHED = "unfinished.txt"
"""lies in a folder until all else does"""


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


@contextmanager
def new_folder(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """Fill a folder beside its place; it moves there when the block ends without an error.

    Args:
        path: a folder that is not there, or empty.
        what: what was being made, for the note that lies in the folder until then.

    Yields:
        The folder to fill.

    Raises:
        UserError: the place holds something, also if it came meanwhile, or cannot be written.
    """
    target = check_target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            marker = draft / UNFINISHED
            marker.write_text(f"{what} was stopped here; this folder can be deleted\n")
            yield draft
            draft.chmod(0o755)
            for file in draft.iterdir():
                if file.is_file():  # some writers leave files that others cannot read
                    file.chmod(file.stat().st_mode | 0o044)
            marker.unlink()
            if target.exists():
                target.rmdir()
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise UserError(f"out: {path} cannot be written ({error})") from error
