"""The text that suites read: documents that no model of an arm was trained on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from diffattn.data import (
    Document,
    TokenFile,
    corpus_digest,
    load_documents,
    load_tokenizer,
    split_documents,
)
from diffattn.errors import UserError
from diffattn.suites.subject import Subject

_SHARE = 0.1  # held out of the bundled text, as in `diffattn compare`


@dataclass(frozen=True)
class Text:
    """Documents to measure on, and those in which words were counted.

    Args:
        documents: held out.
        training: what stands for the models' training text.
        source: in words.
    """

    documents: list[Document]
    training: list[Document]
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of the held-out documents."""
        return corpus_digest(self.documents)


def text_of(data: str | None, subjects: Sequence[Subject]) -> Text:
    """The text of an evaluation.

    Args:
        data: a path that `load_documents` reads, all of it held out; None takes the held-out part
            of the comparison that the arms come from, without arms that of the bundled text.
        subjects: the models.

    Raises:
        UserError: the text cannot be read, or arms come from comparisons on different texts.
    """
    if data is not None:
        documents = load_documents(data)
        return Text(documents, documents, data)
    folders = list(dict.fromkeys(s.data for s in subjects if s.data is not None))
    if not folders:
        training, heldout = split_documents(load_documents(None), _SHARE)
        return Text(heldout, training, "State of the Union addresses (bundled), held-out part")
    sources = {_heldout_digest(folder) for folder in folders}
    if len(sources) > 1:
        raise UserError(
            "data: the arms were trained on different texts, so none is held out for all; name one"
        )
    tokenizer = load_tokenizer(folders[0] / "tokenizer")
    parts = []
    for name in ("heldout", "train"):
        file = TokenFile.open(folders[0] / f"{name}.bin")
        file.verify()
        parts.append(
            [
                Document(f"{name}-{n}", str(tokenizer.decode(ids, skip_special_tokens=True)))
                for n, ids in enumerate(_documents(file))
            ]
        )
    return Text(parts[0], parts[1], f"held-out part of the comparison in {folders[0].parent}")


def _documents(file: TokenFile) -> list[list[int]]:
    ids = file.read(0, file.tokens)
    bounds = file.offsets.tolist()
    return [ids[a:b].tolist() for a, b in pairwise(bounds)]


def _heldout_digest(folder: Path) -> str:
    try:
        return json.loads((folder / "facts.json").read_text(encoding="utf-8"))["sha256_heldout"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"MODEL: {folder} holds no text of a comparison") from error
