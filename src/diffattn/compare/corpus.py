"""The text of a comparison, prepared once in its folder."""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from diffattn.compare.plan import ComparePlan, said_plainly, write_json
from diffattn.data import (
    Document,
    RecallTokens,
    TokenFile,
    cached_tokenizer,
    load_documents,
    load_tokenizer,
    split_documents,
    write_tokens,
)
from diffattn.errors import UserError

HELDOUT_SHARE = 0.1
# more than a token of any vocabulary here stands for: an estimate that reads too much, not too
# little
BYTES_PER_TOKEN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Token files and what the report says of them."""

    train: TokenFile
    heldout: TokenFile
    facts: dict[str, Any]

    @property
    def bos_id(self) -> int:
        """Id that starts every document and recall sequence."""
        if self.train.bos_id is None:
            raise UserError("data: the token file has no BOS; prepare it with bos=True")
        return self.train.bos_id

    def recall_tokens(self, plan: ComparePlan) -> RecallTokens:
        """Ids of needles and questions, above the tokenizer's."""
        return RecallTokens(
            self.facts["vocab_size"], plan.preset.recall_classes, plan.preset.recall_values
        )

    def model_vocabulary(self, plan: ComparePlan) -> int:
        """Entries that a model needs: the tokenizer's and those of recall."""
        return self.facts["vocab_size"] + self.recall_tokens(plan).count


def prepare_corpus(plan: ComparePlan, folder: Path) -> Corpus:
    """Split the documents, train the tokenizer on the training part or load it, encode both parts.

    Args:
        plan: the comparison.
        folder: gets `tokenizer/`, `train.bin`, `heldout.bin`, `facts.json`; kept on a resume.

    Raises:
        UserError: the text cannot be read, is too short, or does not support the vocabulary; the
            folder holds no tokenizer, or one without BOS and EOS.
    """
    try:
        return open_corpus(folder)
    except (OSError, ValueError):
        pass  # not prepared, or damaged since: preparing again gives the same bytes
    training, heldout = split_documents(load_documents(plan.data), HELDOUT_SHARE)
    preset = plan.preset
    training = _enough(training, preset.tokens)
    heldout = _enough(heldout, 2 * preset.heldout_windows * preset.length)
    with said_plainly(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if plan.tokenizer is None:
            tokenizer = cached_tokenizer(
                [document.text for document in training],
                preset.vocab_size,
                folder / "tokenizer",
            )
        else:
            tokenizer = load_tokenizer(plan.tokenizer)
            tokenizer.save_pretrained(folder / "tokenizer")
        train = write_tokens(training, tokenizer, folder / "train.bin")
        held = write_tokens(heldout, tokenizer, folder / "heldout.bin")
        facts = {
            "source": plan.data or "State of the Union addresses (bundled)",
            "documents_train": len(training),
            "documents_heldout": len(heldout),
            "tokens_train": train.tokens,
            "tokens_heldout": held.tokens,
            "vocab_size": len(tokenizer),
            "bytes_per_token": held.bytes_per_token,
            "sha256": train.sha256,
        }
        write_json(folder / "facts.json", facts)
    return Corpus(train=train, heldout=held, facts=facts)


def _enough(documents: list[Document], tokens: int) -> list[Document]:
    """The first documents, in an order that is random but fixed, that hold so many tokens."""
    ordered = sorted(documents, key=lambda document: sha256(document.text.encode()).digest())
    kept, bytes_left = [], tokens * BYTES_PER_TOKEN
    for document in ordered:
        if bytes_left <= 0:
            break
        kept.append(document)
        bytes_left -= len(document.text.encode())
    return kept


def open_corpus(folder: Path) -> Corpus:
    """Open what `prepare_corpus` wrote."""
    return Corpus(
        train=TokenFile.open(folder / "train.bin"),
        heldout=TokenFile.open(folder / "heldout.bin"),
        facts=json.loads((folder / "facts.json").read_text(encoding="utf-8")),
    )
