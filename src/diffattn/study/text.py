"""Text of an adaptation: split, encoded with the model's own tokenizer, kept in a folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffattn.data import (
    Document,
    TokenFile,
    corpus_digest,
    load_documents,
    load_tokenizer,
    split_documents,
    starts_with_bos,
    write_tokens,
)
from diffattn.errors import UserError

HELDOUT_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """Training and held-out tokens of one text, and a digest of the text."""

    train: TokenFile
    heldout: TokenFile
    digest: str


def prepare_text(
    data: str | os.PathLike[str] | None, model: str | os.PathLike[str], folder: Path
) -> Text:
    """Split and encode a text; what lies in the folder from before is read.

    Documents start with the model's BOS token where its tokenizer puts one there by itself, and
    end with EOS where there is one.

    Args:
        data: as for `diffattn.data.load_documents`; None means the bundled speeches.
        model: folder that holds the tokenizer too.
        folder: gets the two token files.

    Raises:
        UserError: the text or the tokenizer cannot be read.
    """
    documents = load_documents(data)
    digest = corpus_digest(documents)
    paths = {name: folder / f"{name}-{digest[:12]}.bin" for name in ("train", "heldout")}
    try:
        return Text(TokenFile.open(paths["train"]), TokenFile.open(paths["heldout"]), digest)
    except UserError:
        pass  # not there yet, or damaged
    tokenizer: Any = load_tokenizer(model)
    train, heldout = (
        _encoded(part, tokenizer, path)
        for part, path in zip(
            split_documents(documents, HELDOUT_SHARE), paths.values(), strict=True
        )
    )
    return Text(train, heldout, digest)


def encode_documents(
    documents: list[Document], tokenizer: Any, folder: Path, name: str
) -> TokenFile:
    """Encode all documents of a text; what lies in the folder from before is read.

    Args:
        documents: of the text.
        tokenizer: of the model.
        folder: gets the token file.
        name: start of its name.
    """
    path = folder / f"{name}-{corpus_digest(documents)[:12]}.bin"
    try:
        return TokenFile.open(path)
    except UserError:
        return _encoded(documents, tokenizer, path)


def _encoded(documents: list[Document], tokenizer: Any, path: Path) -> TokenFile:
    eos = tokenizer.eos_token_id is not None
    return write_tokens(documents, tokenizer, path, bos=starts_with_bos(tokenizer), eos=eos)
