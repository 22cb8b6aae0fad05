"""What a configuration cannot mean, said in one line that names its file."""

from collections.abc import Iterator
from contextlib import contextmanager

from diffattn.errors import UserError


@contextmanager
def reading_config() -> Iterator[None]:
    """Turn any error of building what config.json says into one line.

    A value of the wrong type or one that fits no other raises whatever the class that takes it,
    or the arithmetic behind it, happens to raise.

    Yields:
        Nothing.

    Raises:
        UserError: the block raised something; the message names config.json and the reason.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if not isinstance(error, ValueError) or not reason:
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(f"in: config.json: {reason}") from error
