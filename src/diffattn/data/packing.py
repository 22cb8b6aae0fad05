"""Token streams on disk, cut into windows of equal length."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diffattn.data.corpus import Document
from diffattn.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IntArray = npt.NDArray[np.int64]

_ENCODE_DOCUMENTS = 64  # encoded in one call, so that the tokenizer can use several cores


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenFile:
    """The tokens of a list of documents in one flat little-endian file, mapped when first read.

    Pickling carries the path alone, so worker processes map the file themselves.

    Args:
        path: the flat file; its sidecar has the same name with `.json` appended.
        dtype: `<u2` or `<u4`.
        tokens: tokens in the file, special tokens included.
        offsets: [documents + 1] where each document starts; the last entry is `tokens`.
        text_bytes: [documents] UTF-8 bytes of each document's text.
        bos_id: id that starts each document; None if none does.
        eos_id: id that ends each document; None if none does.
        sha256: of the flat file's bytes.
    """

    path: Path
    dtype: np.dtype[Any]
    tokens: int
    offsets: IntArray
    text_bytes: IntArray
    bos_id: int | None
    eos_id: int | None
    sha256: str

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenFile:
        """Open a file that `write_tokens` wrote.

        Args:
            path: the flat file, without `.json`.

        Returns:
            The token file; its tokens are not read yet.

        Raises:
            UserError: file or sidecar missing, sidecar damaged, or file and sidecar disagree.
        """
        path = Path(path).expanduser().absolute()
        sidecar = _sidecar(path)
        try:
            record = json.loads(sidecar.read_text(encoding="utf-8"))
            opened = cls(
                path=path,
                dtype=np.dtype(record["dtype"]),
                tokens=int(record["tokens"]),
                offsets=np.asarray(record["offsets"], dtype=np.int64),
                text_bytes=np.asarray(record["text_bytes"], dtype=np.int64),
                bos_id=record["bos_id"],
                eos_id=record["eos_id"],
                sha256=record["sha256"],
            )
            size = path.stat().st_size
        except OSError as error:
            raise UserError(
                f"token file: cannot read {error.filename or path}: {error.strerror}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"token file: {sidecar} is damaged: {error!r}") from error
        expected = opened.tokens * opened.dtype.itemsize
        if size != expected:
            raise UserError(
                f"token file: expected {expected} bytes in {path} by its sidecar, got {size}"
            )
        return opened

    def verify(self) -> None:
        """Read the whole file and compare it with its checksum, which `open` leaves undone.

        Raises:
            UserError: a byte has changed since the file was written.
        """
        with self.path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise UserError(
                f"token file: {self.path} is damaged: expected SHA-256 {self.sha256[:12]}... by "
                f"its sidecar, got {found[:12]}..."
            )

    @property
    def text_tokens(self) -> int:
        """Tokens of text, special tokens not counted."""
        specials = (self.bos_id is not None) + (self.eos_id is not None)
        return self.tokens - specials * len(self.text_bytes)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, special tokens counted.

        Mean loss in nats per token of this stream / ln 2 / `bytes_per_token` is bits per byte.
        """
        return int(self.text_bytes.sum()) / self.tokens

    def read(self, start: int, stop: int) -> IntArray:
        """Copy a slice of the stream.

        Args:
            start: first token.
            stop: token after the last; a slice past the end is shorter, as in Python.

        Returns:
            [stop - start] token ids.
        """
        return self._mapped[start:stop].astype(np.int64)

    @cached_property
    def _mapped(self) -> np.memmap[Any, Any]:
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return TokenFile.open, (self.path,)


class Windows:
    """Windows of equal length over a token file, each one once per epoch.

    Index i lies in epoch i // len(self). The tokens after the last whole window are not used.
    """

    def __init__(self, tokens: TokenFile, length: int, seed: int | None) -> None:
        """Cut a token file into windows.

        Args:
            tokens: the stream.
            length: tokens per window, at least 2.
            seed: of the order, which differs by epoch; None means one epoch in file order.

        Raises:
            UserError: `length` is below 2 or above the tokens of the stream; `seed` is negative.
        """
        if length < 2:
            raise UserError(f"length: expected windows of at least 2 tokens, got {length}")
        if tokens.tokens < length:
            raise UserError(
                f"length: the text has {tokens.tokens:,} tokens, fewer than one window of "
                f"{length:,}; use more text or shorter windows"
            )
        if seed is not None and seed < 0:
            raise UserError(f"seed: expected 0 or more, got {seed}")
        self.tokens = tokens
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        """Return the number of windows in one epoch."""
        return self.tokens.tokens // self.length

    def __getitem__(self, index: int) -> IntArray:
        """Return window `index` of the endless sequence of epochs.

        Args:
            index: 0 or more; below `len(self)` if there is no seed.

        Returns:
            [length] token ids.

        Raises:
            IndexError: `index` is out of range.
        """
        return self.located(index)[0]

    def located(self, index: int) -> tuple[IntArray, int]:
        """Return window `index` and the place of its first token in the stream.

        Raises:
            IndexError: `index` is out of range.
        """
        epoch, place = divmod(index, len(self))
        if epoch < 0 or (epoch > 0 and self.seed is None):
            raise IndexError(f"window {index} of {len(self)}")
        if self.seed is not None:
            place = int(_window_order(len(self), self.seed, epoch)[place])
        start = place * self.length
        return self.tokens.read(start, start + self.length), start

    def __iter__(self) -> Iterator[IntArray]:
        """Yield the windows of the first epoch."""
        return (self[index] for index in range(len(self)))


def write_tokens(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    path: str | os.PathLike[str],
    *,
    bos: bool = True,
    eos: bool = True,
) -> TokenFile:
    """Encode documents one after the other into a flat file with a JSON sidecar.

    The names of special tokens inside a text are encoded as text. Both files appear whole or not
    at all, the sidecar last.

    Args:
        documents: at least one.
        tokenizer: any Hugging Face tokenizer.
        path: of the flat file; replaced if it exists.
        bos: start each document with the tokenizer's BOS token.
        eos: end each document with the tokenizer's EOS token.

    Returns:
        The written file, opened.

    Raises:
        UserError: no documents, no tokens, or a special token was asked for that the tokenizer
            does not have.
    """
    path = Path(path).expanduser().absolute()
    bos_id = _special_id("bos", tokenizer.bos_token_id) if bos else None
    eos_id = _special_id("eos", tokenizer.eos_token_id) if eos else None
    largest = max(tokenizer.get_vocab().values())
    dtype = np.dtype("<u2" if largest <= np.iinfo(np.uint16).max else "<u4")
    head = [] if bos_id is None else [bos_id]
    tail = [] if eos_id is None else [eos_id]

    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    offsets = [0]
    text_bytes: list[int] = []
    draft = _draft(path)
    try:
        with draft.open("xb") as file:
            for text, ids in _encode(documents, tokenizer):
                payload = np.asarray(head + ids + tail, dtype=dtype).tobytes()
                file.write(payload)
                digest.update(payload)
                offsets.append(offsets[-1] + len(payload) // dtype.itemsize)
                text_bytes.append(len(text.encode()))
        if offsets[-1] == 0:
            raise UserError(
                f"data: expected tokens for {path}, got none (documents: {len(text_bytes)})"
            )
        record = {
            "dtype": dtype.str,
            "tokens": offsets[-1],
            "offsets": offsets,
            "text_bytes": text_bytes,
            "bos_id": bos_id,
            "eos_id": eos_id,
            "sha256": digest.hexdigest(),
        }
        _publish(draft, path, json.dumps(record))
    finally:
        draft.unlink(missing_ok=True)
    return TokenFile.open(path)


def _special_id(name: str, token_id: object) -> int:
    """Return the id of a special token that was asked for."""
    if not isinstance(token_id, int):
        raise UserError(
            f"{name}: the tokenizer has no {name.upper()} token; pass {name}=False or another one"
        )
    return token_id


def _encode(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, list[int]]]:
    """Yield each text with its token ids, without any special token."""
    remaining = iter(documents)
    while texts := [document.text for document in islice(remaining, _ENCODE_DOCUMENTS)]:
        encoded = tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )
        yield from zip(texts, encoded["input_ids"], strict=True)


def _publish(draft: Path, path: Path, record: str) -> None:
    """Give a finished file its name, then write its sidecar."""
    sidecar = _sidecar(path)
    # A crash between the two replacements must not leave another stream's sidecar; the same
    # stream's stays, since another process may be reading it.
    if sidecar.exists() and sidecar.read_bytes() != record.encode():
        sidecar.unlink(missing_ok=True)
    os.replace(draft, path)
    sidecar_draft = _draft(sidecar)
    try:
        sidecar_draft.write_text(record, encoding="utf-8")
        os.replace(sidecar_draft, sidecar)
    finally:
        sidecar_draft.unlink(missing_ok=True)


def _sidecar(path: Path) -> Path:
    """Return the place of a token file's sidecar."""
    return path.with_name(path.name + ".json")


def _draft(path: Path) -> Path:
    """Return an unused hidden name beside a path, hence on the same file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


# Two entries: the current epoch, plus a neighbour for workers that read ahead.
@lru_cache(maxsize=2)
def _window_order(windows: int, seed: int, epoch: int) -> IntArray:
    """Return the order of the windows in one epoch."""
    order = np.random.default_rng([seed, epoch]).permutation(windows)
    order.flags.writeable = False
    return order
