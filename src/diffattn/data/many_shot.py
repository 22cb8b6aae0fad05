"""Many-shot classification: a long list of questions with their classes, each told in order."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diffattn.data.answers import AnswerItem, Span, encode_answers
from diffattn.data.corpus import Document
from diffattn.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BUNDLED = Path(__file__).with_name("banking77.jsonl.xz")
_TEMPLATE = "query: {text}\nintent:"
Example = tuple[str, str]
"""a text and its label"""


@cache
def bundled_queries() -> tuple[Example, ...]:
    """The questions of BANKING77 with their intents (CC BY 4.0, see NOTICE.md)."""
    with lzma.open(_BUNDLED, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return tuple((record["text"], record["label"]) for record in records)


def query_documents(examples: Sequence[Example] | None = None) -> list[Document]:
    """The questions as plain text, those of one class a document.

    Args:
        examples: texts with labels; None means `bundled_queries`.
    """
    return [Document(label, "\n".join(texts)) for label, texts in _by_label(examples).items()]


def many_shot_items(
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    count: int,
    classes: int = 10,
    examples: Sequence[Example] | None = None,
    seed: int = 0,
) -> list[AnswerItem]:
    """Lists of examples in which each class must be told from the examples before.

    Every list has classes of its own, whose labels differ in their first token: the model's
    choice among these tokens is its answer. The second half of each list is asked for, so that an
    answer has many shots before it. One pass over the list asks all of them.

    Args:
        tokenizer: of the model.
        context: tokens of a list at most.
        count: lists.
        classes: of a list.
        examples: texts with labels; None means `bundled_queries`.
        seed: of classes and order.

    Returns:
        The items; an answer is the first token of a label, `choices` those of all its classes.

    Raises:
        UserError: fewer than two classes can be told apart by a token, or no list fits.

    Source: many-shot in-context learning as in Ye et al., arXiv 2410.05258, section 3.4.
    Differs: each example is asked for in the place where it stands, not at the end of a list of
        its own; our choice, for one pass then gives many answers.
    """
    by_label = _by_label(examples)
    first = {label: _first_token(label, tokenizer) for label in by_label}
    items = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        chosen: dict[int, str] = {}
        for place in rng.permutation(len(first)):
            label = list(first)[place]
            if len(chosen) < classes:
                chosen.setdefault(first[label], label)
        if len(chosen) < 2:
            raise UserError("examples: expected two labels that start with different tokens")
        pool = [(text, label) for label in chosen.values() for text in by_label[label]]
        order = [pool[n] for n in rng.permutation(len(pool))]
        item = _longest(order, tokenizer, context)
        items.append(AnswerItem(item.input_ids, item.spans, tuple(chosen)))
    return items


def _by_label(examples: Sequence[Example] | None) -> dict[str, list[str]]:
    """The texts of each label, in order; None means the bundled ones."""
    found: dict[str, list[str]] = {}
    for text, label in bundled_queries() if examples is None else examples:
        found.setdefault(label, []).append(text)
    return found


def _first_token(label: str, tokenizer: PreTrainedTokenizerBase) -> int:
    prompt = _TEMPLATE.format(text="a")
    text = f"{prompt} {label}"
    item = encode_answers(text, [(len(prompt) + 1, len(text))], tokenizer)
    return int(item.input_ids[item.spans[0][0]])


def _longest(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, context: int
) -> AnswerItem:
    """The longest list of examples within so many tokens; its second half is asked for."""
    texts, sizes = [], []
    for text, label in examples:
        texts.append((_TEMPLATE.format(text=text), f" {label}\n"))
        sizes.append(len(tokenizer("".join(texts[-1]))["input_ids"]))
        if sum(sizes) > context:
            break
    while len(texts) >= 2:
        whole, answers = "", list[Span]()
        for place, (prompt, label) in enumerate(texts):
            whole += prompt
            if place >= len(texts) // 2:
                answers.append((len(whole) + 1, len(whole) + 2))
            whole += label
        item = encode_answers(whole, answers, tokenizer)
        if len(item.input_ids) <= context:
            return item
        texts.pop()
    raise UserError(f"context: no list of two examples fits in {context} tokens")
