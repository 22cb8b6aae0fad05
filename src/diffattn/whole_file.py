"""Files that appear whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

DRAFT = ".draft"
"""end of the name of a file that is being written, which starts with a dot"""


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; an existing file is replaced."""
    draft = path.with_name(f".{path.name}.{os.getpid()}{DRAFT}")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")
