"""Lock files between processes."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock file inside the block; it is free again when its process ends, however it ends.

    Args:
        path: of the lock file, in a folder that is there.
        wait: until another process gives it back.

    Yields:
        Whether the lock is held; always True with `wait`.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
