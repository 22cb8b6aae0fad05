"""Byte-level BPE tokenizers trained on the user's own text."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffattn.errors import UserError, needs_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
_SPECIALS = [BOS, EOS, PAD]
_SMALLEST_VOCABULARY = 256 + len(_SPECIALS)
_FINGERPRINT_FILE = "fingerprint.txt"
# Raised when the way of training changes, so that cached tokenizers are trained anew.
_RECIPE = "byte-level-bpe-1"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode any text without loss.

    Pairs that occur once are never merged (our choice). The same texts in the same order give
    the same tokenizer. Encoding adds no special token by itself.

    Args:
        texts: the training documents only.
        vocab_size: entries in all: 256 bytes, `<bos>`, `<eos>`, `<pad>`, the rest merges.

    Returns:
        A tokenizer of exactly `vocab_size` entries.

    Raises:
        UserError: `vocab_size` is below 259, or the texts do not support that many entries.
    """
    with needs_extra("training a tokenizer", "hf"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

    if vocab_size < _SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size: expected at least {_SMALLEST_VOCABULARY} (256 bytes, "
            f"{len(_SPECIALS)} special tokens), got {vocab_size}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    supported = backend.get_vocab_size()
    if supported < vocab_size:
        raise UserError(
            f"vocab_size: expected at most {supported}, which is what this text supports, "
            f"got {vocab_size}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder, never from a hub, never with its own code.

    Args:
        folder: what `save_pretrained` of any Hugging Face tokenizer wrote.

    Returns:
        The tokenizer.

    Raises:
        UserError: no such folder, or no tokenizer that can be loaded from it.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"tokenizer: expected a folder with a saved tokenizer, got {path}")
    with needs_extra("loading a tokenizer", "hf"):
        from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a foreign folder fails in many ways inside the package
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(" :")
        raise UserError(f"tokenizer: no tokenizer could be loaded from {path}: {reason}") from error


def cached_tokenizer(
    texts: Sequence[str], vocab_size: int, folder: str | os.PathLike[str]
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of these texts from a folder, training it there first if it is not there.

    The folder appears complete or not at all. Of two processes that train at once, the second to
    finish keeps what the first wrote.

    Args:
        texts: the training documents only.
        vocab_size: as for `train_tokenizer`.
        folder: where the tokenizer is kept; a tokenizer that this function wrote there for other
            texts, another size or other library versions is replaced.

    Returns:
        The tokenizer, read from `folder` in either case.

    Raises:
        UserError: as `train_tokenizer`; or `folder` holds something that is not a cached tokenizer.
    """
    path = Path(folder).expanduser()
    fingerprint = _fingerprint(texts, vocab_size)
    if _stored_fingerprint(path) != fingerprint:
        tokenizer = train_tokenizer(texts, vocab_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = _sibling(path)
        try:
            tokenizer.save_pretrained(draft)
            (draft / _FINGERPRINT_FILE).write_text(fingerprint)
            _publish(draft, path, fingerprint)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return load_tokenizer(path)


def _fingerprint(texts: Sequence[str], vocab_size: int) -> str:
    """Hash everything that the trained tokenizer depends on."""
    with needs_extra("training a tokenizer", "hf"):
        import tokenizers
        import transformers
    digest = hashlib.sha256(
        f"{_RECIPE} {vocab_size} {tokenizers.__version__} {transformers.__version__}".encode()
    )
    for text in texts:
        payload = text.encode()
        digest.update(len(payload).to_bytes(8, "big") + payload)
    return digest.hexdigest()


def _stored_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint kept in a folder; None for a missing or empty folder."""
    try:
        return (folder / _FINGERPRINT_FILE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(
                f"folder: expected a cached tokenizer or nothing at {folder}, got other files"
            ) from None
        return None


def _publish(draft: Path, folder: Path, fingerprint: str) -> None:
    """Give a finished draft its name, unless another process just published the same."""
    while True:
        try:
            os.rename(draft, folder)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if _stored_fingerprint(folder) == fingerprint:
            return
        # A folder cannot be replaced in one step: the stale one steps aside first. Another
        # process may have moved it already.
        stale = _sibling(folder)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, stale)
            shutil.rmtree(stale)


def _sibling(path: Path) -> Path:
    """Return an unused hidden name beside a path, hence on the same file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")
