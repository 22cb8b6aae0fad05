"""Tables of results inside documents: the block between two marks is written, the rest is kept.

A document says `<!-- speed:begin -->` where it wants every table, `<!-- speed:begin brief -->`
where it wants one a benchmark, and `<!-- speed:end -->` below.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from diffattn.bench.run import KINDS, kind_of
from diffattn.errors import UserError
from diffattn.folder import read_json
from diffattn.whole_file import write_text

_BLOCK = re.compile(r"(<!-- speed:begin( brief)? -->\n)(.*?)(<!-- speed:end -->)", flags=re.DOTALL)


def with_tables(text: str, results: Iterable[Path], name: str = "the document") -> str:
    """A document with the tables of results in its block.

    Args:
        text: of the document.
        results: files that benchmarks wrote, in the order of their tables.
        name: of the document, for the message.

    Raises:
        UserError: it has no block, or a file holds no results.
    """
    if len(_BLOCK.findall(text)) != 1:
        raise UserError(
            f"readme: expected one pair of <!-- speed:begin --> and <!-- speed:end --> in {name}"
        )
    loaded = [_read(path) for path in results]

    def block(match: re.Match[str]) -> str:
        begin, brief, _, end = match.groups()
        return begin + "".join(_tables(found, brief is not None) for found in loaded) + end

    return _BLOCK.sub(block, text)


def write_tables(document: str | Path, results: Iterable[str | Path]) -> None:
    """Write the tables of results into a document's block.

    Raises:
        UserError: the document is not there or has no block, or a file holds no results.
    """
    path = Path(document)
    if not path.is_file():
        raise UserError(f"readme: expected a file, got {path}")
    text = path.read_text(encoding="utf-8")
    write_text(path, with_tables(text, map(Path, results), str(path)))


def _read(path: Path) -> dict:
    if not path.is_file():
        raise UserError(f"results: expected a file, got {path}")
    found = read_json(path)
    if found.get("kind") not in KINDS or "records" not in found:
        raise UserError(f"results: expected what diffattn bench wrote, got {path}")
    return found


def _tables(results: dict, brief: bool) -> str:
    module, machine = kind_of(results["kind"]), results["machine"]
    tables = [module.brief(results)] if brief else module.tables(results)
    said = (
        f"`{results['command']}` on {machine['accelerator'] or machine['processor']}, "
        f"{machine['threads']} threads, torch {machine['torch']}:"
    )
    return "\n" + "\n\n".join([said, *(table.markdown() for table in tables)]) + "\n\n"
