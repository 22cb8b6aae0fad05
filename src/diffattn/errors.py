"""The exceptions that are meant for the person at the keyboard."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Bad input from a person, said in one line.

    The message names the argument, what was expected and what came. The command line prints it
    without a traceback and exits with code 2; in the library it is an ordinary `ValueError`.
    """


class MissingExtraError(UserError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


@contextmanager
def needs_extra(feature: str, extra: str) -> Iterator[None]:
    """Turn a missing package, imported inside the block, into one line that names the extra.

    Args:
        feature: what needs the package, as the subject of "needs".
        extra: the extra of diffattn that installs it.

    Yields:
        Nothing.

    Raises:
        MissingExtraError: an import inside the block found no such package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{feature} needs the package `{error.name}`: pip install 'diffattn[{extra}]'"
        ) from error
