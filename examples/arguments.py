"""Values of command-line arguments that are refused before any work is done."""

import argparse
import os
from pathlib import Path


def steps(text: str) -> int:
    """A number of training steps, at least 1; for `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def new_file(text: str) -> Path:
    """Path of a file that can be written; for `argparse`."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that may be written, got {text!r}")
    return path
