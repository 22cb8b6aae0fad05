"""Texts with places where a right answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diffattn.data.packing import IntArray
from diffattn.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""start and stop, in characters or in tokens"""


@dataclass(frozen=True)
class AnswerItem:
    """Tokens of a text and the places of its answers.

    Args:
        input_ids: [length].
        spans: tokens of each answer, [start, stop) with start above 0.
        choices: ids among which an answer of one token is to be found; None means the vocabulary.
    """

    input_ids: IntArray
    spans: tuple[Span, ...]
    choices: tuple[int, ...] | None = None


def starts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer puts its BOS token before a text by itself."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def encode_answers(
    text: str, answers: Sequence[Span], tokenizer: PreTrainedTokenizerBase
) -> AnswerItem:
    """Encode a text and find the tokens of its answers.

    Args:
        text: with the answers in it.
        answers: characters of each answer, [start, stop).
        tokenizer: a fast one, which knows where its tokens lie.

    Returns:
        The item; an answer has every token that holds one of its characters.

    Raises:
        UserError: the tokenizer does not tell where tokens lie, gives none for an answer, or the
            same for different ones.
    """
    if not tokenizer.is_fast:
        raise UserError("tokenizer: expected a fast one, which knows the places of its tokens")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    head = [tokenizer.bos_token_id] if starts_with_bos(tokenizer) else []
    ends = np.array(encoded["offset_mapping"]).reshape(-1, 2)
    spans = []
    for start, stop in answers:
        inside = np.flatnonzero((ends[:, 1] > start) & (ends[:, 0] < stop)) + len(head)
        if not len(inside):
            raise UserError(f"tokenizer: it gives no token for {text[start:stop]!r}")
        spans.append((int(inside[0]), int(inside[-1]) + 1))
    ids = np.array(head + encoded["input_ids"], dtype=np.int64)
    told = {
        text[start:stop]: tuple(ids[a:b])
        for (start, stop), (a, b) in zip(answers, spans, strict=True)
    }
    if len(set(told.values())) < len(told):
        raise UserError(f"tokenizer: it gives the same tokens for some of {sorted(told)}")
    return AnswerItem(ids, tuple(spans))
