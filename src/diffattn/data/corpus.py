"""Documents of text, read from what a person has on disk."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffattn.errors import UserError, needs_extra

_BUNDLED = Path(__file__).with_name("sotu.jsonl.xz")
_TEXT_SUFFIXES = (".txt", ".md")
_JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
_EXPECTED = (
    "a text file, a .jsonl, .jsonl.gz or .jsonl.xz file, a folder of such files, "
    "or a data set saved by `datasets`"
)
# Records in text, which would be trained on with their names and commas, and tables in binary.
_RECORD_SUFFIXES = (
    *(".json", ".ndjson", ".jsonl", ".csv", ".tsv"),
    *(".parquet", ".arrow", ".feather", ".orc", ".avro", ".xls", ".xlsx"),
)
_COMPRESSED_SUFFIXES = (".gz", ".xz", ".bz2", ".zst", ".zip")
_PIECE_CHARACTERS = 4_000
# Where a long text may be cut, best first: blank lines, line ends, anywhere.
_CUTS = (re.compile(r"\n(?:[ \t\r]*\n)+"), re.compile(r"\n"), re.compile(r"(?s:.)"))


@dataclass(frozen=True, slots=True)
class Document:
    """A named text, the unit that is either trained on or held out."""

    name: str
    text: str


def load_documents(source: str | os.PathLike[str] | None) -> list[Document]:
    """Read the documents of a file, a folder or a saved data set.

    A plain text file is cut at blank lines into pieces of at least about 4,000 characters, so
    that some of them can be held out; without blank lines it is cut at line ends, without these
    anywhere. In a folder each text file is one document, unless it is the only file. Names that
    start with a dot are skipped, documents without text are dropped.

    Args:
        source: a text file; a `.jsonl`, `.jsonl.gz` or `.jsonl.xz` file with the text in the field
            `text`; a folder, searched recursively for these and for `.txt` and `.md` files; a
            data set saved by `datasets` with the column `text` (of several splits, `train`).
            None means the bundled State of the Union addresses.

    Returns:
        At least one document, in the order of the sorted file names and of their lines.

    Raises:
        UserError: nothing there, not readable, not UTF-8 text, a file of records other than JSON
            lines, a line that is not a JSON object, no field or column `text`, or no document
            with text.
    """
    path = _BUNDLED if source is None else Path(source).expanduser()
    try:
        documents = _read(path)
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror or error}") from error
    if not documents:
        raise UserError(f"data: no documents with text in {path}")
    return documents


def split_documents(
    documents: Sequence[Document], heldout_share: float = 0.1
) -> tuple[list[Document], list[Document]]:
    """Set aside the documents whose hash falls below a share of the hash's range.

    A document's side depends on its own text alone, so order does not matter and exact
    duplicates stay together. Only if that leaves a side empty is the text whose hash is nearest
    to the share moved there.

    Args:
        documents: with at least two different texts.
        heldout_share: expected share of documents that are held out, between 0 and 1.

    Returns:
        The training documents and the held-out documents, each in the given order, neither empty.

    Raises:
        UserError: fewer than two different documents, or a share outside (0, 1).
    """
    if not 0 < heldout_share < 1:
        raise UserError(f"heldout_share: expected more than 0 and less than 1, got {heldout_share}")
    positions = {document.text: _hash_position(document.text) for document in documents}
    if len(positions) < 2:
        raise UserError(
            "data: expected at least 2 different documents, so that one can be held out, got "
            f"{len(positions)} of {sum(map(len, positions)):,} characters (a text file is cut into "
            f"documents of at least {_PIECE_CHARACTERS:,})"
        )
    heldout = {text for text, position in positions.items() if position < heldout_share}
    if len(heldout) in (0, len(positions)):
        heldout ^= {min(positions, key=lambda text: abs(positions[text] - heldout_share))}
    return (
        [document for document in documents if document.text not in heldout],
        [document for document in documents if document.text in heldout],
    )


def corpus_digest(documents: Iterable[Document]) -> str:
    """Fingerprint texts, whatever their names and their order.

    Args:
        documents: of the corpus.

    Returns:
        SHA-256 over the sorted SHA-256 of each text, in hexadecimal.
    """
    digests = sorted(hashlib.sha256(document.text.encode()).digest() for document in documents)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _hash_position(text: str) -> float:
    """Map a text to a place in [0, 1) by the first 8 bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _read(path: Path) -> list[Document]:
    """Read a path by what it is: a saved data set, a folder or a file."""
    if not path.exists():
        raise UserError(f"data: {path} does not exist; expected {_EXPECTED}")
    if path.is_dir():
        saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
        return _read_saved_dataset(path) if saved else _read_folder(path)
    _refuse_records(path)
    if path.is_file() and path.stat().st_size == 0:
        raise UserError(f"data: {path} is empty")
    return list(_read_file(path, path.name, cut=True))


def _refuse_records(path: Path) -> None:
    """Refuse a file that holds records in another form than JSON lines."""
    name = path.name.lower()
    for suffix in _COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    found = next((suffix for suffix in _RECORD_SUFFIXES if name.endswith(suffix)), None)
    if found is not None and not path.name.endswith(_JSONL_SUFFIXES):
        raise UserError(
            f"data: {path} holds records, not text ({found}); expected {_EXPECTED}; a JSONL holds "
            'one {"text": ...} a line'
        )


def _read_folder(folder: Path) -> list[Document]:
    """Read all files of known suffix under a folder, sorted by their path within it."""
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.name.endswith(_TEXT_SUFFIXES + _JSONL_SUFFIXES) and path.is_file()
    }
    names = sorted(name for name in files if not re.search(r"(^|/)\.", name))
    if not names:
        suffixes = ", ".join(_TEXT_SUFFIXES + _JSONL_SUFFIXES)
        raise UserError(f"data: no {suffixes} files in the folder {folder}")
    cut = len(names) == 1
    return [document for name in names for document in _read_file(files[name], name, cut=cut)]


def _read_file(path: Path, name: str, *, cut: bool) -> Iterator[Document]:
    """Yield the documents of one file; `cut` applies to plain text only."""
    text = _decode(path, _decompress(path, path.read_bytes()))
    if path.name.endswith(_JSONL_SUFFIXES):
        yield from _parse_jsonl(path, name, text)
    elif cut:
        pieces = [piece for piece in _cut_text(text, _CUTS) if piece.strip()]
        for number, piece in enumerate(pieces, start=1):
            yield Document(f"{name}#{number}", piece)
    elif text.strip():
        yield Document(name, text)


def _decompress(path: Path, payload: bytes) -> bytes:
    """Undo the compression that the suffix of a JSONL file names."""
    try:
        if path.name.endswith(".jsonl.gz"):
            return gzip.decompress(payload)
        if path.name.endswith(".jsonl.xz"):
            return lzma.decompress(payload)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"data: {path} cannot be decompressed: {error}") from error
    return payload


def _decode(path: Path, payload: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark."""
    if (position := payload.find(b"\0")) >= 0:
        raise UserError(f"data: {path} is binary, not UTF-8 text: NUL at byte {position}")
    try:
        return payload.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data: {path} is not UTF-8 text: 0x{payload[error.start]:02x} at byte {error.start}"
        ) from error


def _parse_jsonl(path: Path, name: str, text: str) -> Iterator[Document]:
    """Yield one document per JSON line that has text."""
    # Not splitlines(): JSON strings may hold other line separators unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            document = Document(f"{name}:{number}", _parse_line(f"{path}:{number}", line))
            if document.text.strip():
                yield document


def _parse_line(place: str, line: str) -> str:
    """Return the field `text` of a JSON object; `place` names its line in messages."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"data: {place} is not JSON: {error.msg} at column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise UserError(f"data: {place} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise UserError(
            f"data: {place}: expected a JSON object with the field `text`, "
            f"got {type(record).__name__}"
        )
    if "text" not in record:
        raise UserError(f"data: {place} has no field `text`; found {_listed(record)}")
    return _checked_text(place, record["text"])


def _checked_text(place: str, text: object) -> str:
    """Return `text` if it is a string that UTF-8 can hold."""
    if not isinstance(text, str):
        raise UserError(f"data: {place}: expected a string in `text`, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"data: {place}: `text` holds half a surrogate pair at character {error.start}"
        ) from error
    return text


def _read_saved_dataset(folder: Path) -> list[Document]:
    """Read the column `text` of a data set written by `save_to_disk`."""
    with needs_extra(f"data: {folder} is a saved data set, which", "hf"):
        import datasets
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder fails in many ways inside the package
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"data: {folder} is not a readable saved data set: {reason}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if "train" not in dataset:
            raise UserError(f"data: {folder} has no split `train`; found {_listed(dataset)}")
        dataset = dataset["train"]
    if "text" not in dataset.column_names:
        raise UserError(
            f"data: {folder} has no column `text`; found {_listed(dataset.column_names)}"
        )
    texts = (_checked_text(f"{folder} row {row}", text) for row, text in enumerate(dataset["text"]))
    return [
        Document(f"{folder.name}:{row}", text) for row, text in enumerate(texts) if text.strip()
    ]


def _listed(names: Iterable[object]) -> str:
    """Join names for a message."""
    return ", ".join(map(str, names)) or "none"


def _cut_text(text: str, cuts: Sequence[re.Pattern[str]]) -> list[str]:
    """Cut a text into pieces of at least `_PIECE_CHARACTERS` that join to the text again.

    Args:
        text: of any length; one that is too short for two pieces is not cut.
        cuts: what a piece may end with, best first; the next is used within pieces that the
            first leaves long enough for two.

    Returns:
        The pieces in order.
    """
    if len(text) < 2 * _PIECE_CHARACTERS or not cuts:
        return [text]
    pieces = []
    start = 0
    while (match := cuts[0].search(text, start + _PIECE_CHARACTERS - 1)) and (
        len(text) - match.end() >= _PIECE_CHARACTERS
    ):
        pieces.append(text[start : match.end()])
        start = match.end()
    pieces.append(text[start:])
    return [part for piece in pieces for part in _cut_text(piece, cuts[1:])]
