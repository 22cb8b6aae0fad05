"""Records of one model in one suite: a line for each item, kept as soon as it is measured."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffattn.errors import UserError

Record = dict[str, Any]
"""`id`, `cluster` or None, `values` by name (None where an item has none), `flags`"""


class Records:
    """The file of a model's records; a line that a crash has torn is measured again.

    Args:
        path: `.jsonl`; its first line is the header.
        header: everything that the records rest on.

    Raises:
        UserError: the file was begun with another header, or is no such file.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = json.loads(json.dumps(header))
        self.found: dict[str, Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            whole = self._read(path.read_bytes())
        if whole:
            os.truncate(path, whole)
        else:
            path.write_bytes(_line(self.header))

    def _read(self, content: bytes) -> int:
        """Take the whole lines; the number of their bytes."""
        end = content.rfind(b"\n") + 1
        if not end:
            return 0
        try:
            first, *others = (json.loads(line) for line in content[:end].splitlines())
            changed = sorted(
                n for n in {*first, *self.header} if first.get(n) != self.header.get(n)
            )
            self.found = {record["id"]: record for record in others}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"out: {self.path} is damaged; delete it, and it is made again"
            ) from error
        if changed:
            name = changed[0]
            raise UserError(
                f"{name}: {self.path} was begun with another one; choose another folder"
            )
        return end

    def add(self, record: Record) -> None:
        """Keep a record, whole or not at all."""
        with self.path.open("ab") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())
        self.found[record["id"]] = record


def _line(value: Mapping[str, Any]) -> bytes:
    # NaN is written as null: no number, and JSON that every reader takes
    return (json.dumps(value, allow_nan=False) + "\n").encode()
