"""JSON files that appear whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

DRAFT = ".draft"
"""end of the name of a file that is being written, which starts with a dot"""


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}{DRAFT}")
    try:
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
