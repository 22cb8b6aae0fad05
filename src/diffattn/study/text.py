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
from diffattn.study.base import tokenizer_digest

HELDOUT_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """Training and held-out tokens of one text.

    Args:
        train: tokens.
        heldout: tokens of other documents.
        digest: of the text.
        documents: all of it.
    """

    train: TokenFile
    heldout: TokenFile
    digest: str
    documents: list[Document]


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
    train, heldout = split_documents(documents, HELDOUT_SHARE)
    return Text(
        encode_documents(train, Path(model), folder, "train"),
        encode_documents(heldout, Path(model), folder, "heldout"),
        corpus_digest(documents),
        documents,
    )


def encode_documents(documents: list[Document], model: Path, folder: Path, name: str) -> TokenFile:
    """Encode all documents of a text; what lies in the folder from before is read.

    Args:
        documents: of the text.
        model: folder that holds the tokenizer too.
        folder: gets the token file.
        name: start of its name.
    """
    mark = tokenizer_digest(model)[:12]
    path = folder / f"{name}-{corpus_digest(documents)[:12]}-{mark}.bin"
    try:
        opened = TokenFile.open(path)
        opened.verify()
        return opened
    except UserError:
        pass  # not there yet, or damaged
    tokenizer: Any = load_tokenizer(model)
    eos = tokenizer.eos_token_id is not None
    return write_tokens(documents, tokenizer, path, bos=starts_with_bos(tokenizer), eos=eos)
