"""The text of a comparison, prepared once in its folder."""

import json
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diffattn.compare.plan import ComparePlan, said_plainly
from diffattn.data import (
    Document,
    RecallTokens,
    TokenFile,
    cached_tokenizer,
    corpus_digest,
    load_documents,
    load_tokenizer,
    split_documents,
    write_tokens,
)
from diffattn.errors import UserError
from diffattn.whole_file import write_json

HELDOUT_SHARE = 0.1
# more than a token of any vocabulary here stands for: an estimate that reads too much, not too
# little
BYTES_PER_TOKEN = 6
_FACTS = {
    *("source", "source_sha256", "documents_train", "documents_train_given", "documents_heldout"),
    *("documents_heldout_given", "tokens_train", "tokens_heldout", "vocab_size"),
    *("bytes_per_token", "sha256", "sha256_heldout", "sha256_tokenizer"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Token files, their tokenizer, and what the report says of them."""

    train: TokenFile
    heldout: TokenFile
    tokenizer: Any
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
        folder: gets `tokenizer/`, `train.bin`, `heldout.bin`, `facts.json`; kept on a resume, and
            prepared again where it is damaged.

    Raises:
        UserError: the text cannot be read, is too short, or does not support the vocabulary; the
            tokenizer cannot be loaded or has no BOS or EOS; text or tokenizer are no longer those
            that the folder was made from.
    """
    documents = load_documents(plan.data)
    digest = corpus_digest(documents)
    given = None if plan.tokenizer is None else _given_tokenizer(plan.tokenizer)
    known = _read_facts(folder)
    if known is not None and known["source_sha256"] != digest:
        raise UserError(
            f"data: {known['source']} is not the text that {folder.parent} was made from; bring "
            "that text back, or choose another folder"
        )
    parts = split_documents(documents, HELDOUT_SHARE)
    preset = plan.preset
    training = _enough(parts[0], preset.tokens)
    heldout = _enough(parts[1], 2 * preset.heldout_windows * preset.length)
    try:
        corpus = open_corpus(folder)
    except (OSError, ValueError):
        pass  # not prepared, or damaged since: preparing again gives the same bytes
    else:
        if given is not None and not _encodes_alike(given, corpus, heldout):
            raise _another_tokenizer(plan, folder)
        return corpus
    with said_plainly(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if known is not None:
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # what is damaged is unknown
        if given is None:
            tokenizer = cached_tokenizer(
                [document.text for document in training],
                preset.vocab_size,
                folder / "tokenizer",
            )
        else:
            tokenizer = given
            tokenizer.save_pretrained(folder / "tokenizer")
        train = write_tokens(training, tokenizer, folder / "train.bin")
        held = write_tokens(heldout, tokenizer, folder / "heldout.bin")
        facts = {
            "source": plan.data or "State of the Union addresses (bundled)",
            "source_sha256": digest,
            "documents_train": len(training),
            "documents_train_given": len(parts[0]),
            "documents_heldout": len(heldout),
            "documents_heldout_given": len(parts[1]),
            "tokens_train": train.tokens,
            "tokens_heldout": held.tokens,
            "vocab_size": len(tokenizer),
            "bytes_per_token": held.bytes_per_token,
            "sha256": train.sha256,
            "sha256_heldout": held.sha256,
            "sha256_tokenizer": _files_digest(folder / "tokenizer"),
        }
        if known is not None and known != facts:
            raise _another_tokenizer(plan, folder)
        write_json(folder / "facts.json", facts)
    return Corpus(train=train, heldout=held, tokenizer=tokenizer, facts=facts)


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
    """Open what `prepare_corpus` wrote, and check every byte of it.

    Raises:
        UserError: something is missing, or has changed since it was written.
    """
    facts = _read_facts(folder)
    if facts is None:
        raise UserError(f"data: {folder / 'facts.json'} is missing or damaged")
    train, heldout = (TokenFile.open(folder / name) for name in ("train.bin", "heldout.bin"))
    for part in (train, heldout):
        part.verify()
    found = train.sha256, heldout.sha256, _files_digest(folder / "tokenizer")
    if found != (facts["sha256"], facts["sha256_heldout"], facts["sha256_tokenizer"]):
        raise UserError(f"data: {folder} is damaged; its files are not those of facts.json")
    return Corpus(
        train=train,
        heldout=heldout,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        facts=facts,
    )


def _read_facts(folder: Path) -> dict[str, Any] | None:
    """What is known of the prepared text; None where there is none yet, or a damaged record."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and set(facts) == _FACTS else None


def _given_tokenizer(folder: str) -> Any:
    tokenizer = load_tokenizer(folder)
    missing = [
        name for name in ("bos_token", "eos_token") if getattr(tokenizer, f"{name}_id") is None
    ]
    if missing:
        raise UserError(
            f"tokenizer: expected tokens that start and end a document, {folder} has no "
            f"{' and no '.join(missing)}; name one of its special tokens there, in "
            "tokenizer_config.json"
        )
    return tokenizer


def _encodes_alike(tokenizer: Any, corpus: Corpus, heldout: list[Document]) -> bool:
    """Whether a tokenizer has the vocabulary of the folder's, and encodes held-out text alike."""
    with TemporaryDirectory() as place:
        again = write_tokens(heldout, tokenizer, Path(place) / "heldout.bin")
    same_vocabulary = tokenizer.get_vocab() == corpus.tokenizer.get_vocab()
    return same_vocabulary and again.sha256 == corpus.heldout.sha256


def _another_tokenizer(plan: ComparePlan, folder: Path) -> UserError:
    named = plan.tokenizer or "the installed version of `tokenizers`"
    return UserError(
        f"tokenizer: {named} gives other tokens than {folder.parent} was made with; bring the "
        "former one back, or choose another folder"
    )


def _files_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the files in a folder."""
    digest = sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
