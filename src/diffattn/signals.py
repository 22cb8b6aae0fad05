"""Signals as requests: long work is stopped at its next step, short work unwinds."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn


@contextmanager
def handled(signals: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    """Handle signals so while the block runs; outside of the main thread nothing is changed.

    Yields:
        Nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread may set what a signal does
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def asks_once(stop: Any) -> Callable[[int, Any], None]:
    """A handler that sets an event; a second signal ends the command at once.

    Args:
        stop: an event of threading or multiprocessing.
    """

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        stop.set()

    return ask


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Inside the block the first Ctrl-C or SIGTERM is a request, the second one interrupts.

    Yields:
        A function that tells whether a stop was asked for.
    """
    stop = threading.Event()
    with handled([signal.SIGINT, signal.SIGTERM], asks_once(stop)):
        yield stop.is_set


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the block, so that what is half written is removed.

    Yields:
        Nothing.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with handled([signal.SIGTERM], stop):
        yield
