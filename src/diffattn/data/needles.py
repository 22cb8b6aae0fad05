"""Multi-needle retrieval: numbers of cities hidden in a text and asked for at its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from diffattn.data.answers import AnswerItem, Span, encode_answers
from diffattn.data.corpus import Document
from diffattn.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CITIES = (
    *("Amsterdam", "Ankara", "Athens", "Auckland", "Baghdad", "Bangkok", "Barcelona", "Beijing"),
    *("Berlin", "Bogota", "Boston", "Brussels", "Bucharest", "Budapest", "Cairo", "Caracas"),
    *("Chicago", "Copenhagen", "Dakar", "Delhi", "Denver", "Dubai", "Dublin", "Geneva"),
    *("Hamburg", "Hanoi", "Havana", "Helsinki", "Istanbul", "Jakarta", "Johannesburg", "Kabul"),
    *("Kingston", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Melbourne"),
    *("Miami", "Milan", "Montreal", "Moscow", "Mumbai", "Munich", "Nairobi", "Oslo"),
    *("Paris", "Prague", "Quito", "Rome", "Santiago", "Seattle", "Seoul", "Shanghai"),
    *("Singapore", "Sofia", "Stockholm", "Sydney", "Tehran", "Tokyo", "Vienna", "Warsaw"),
)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_OPENING = "Remember the magic numbers of cities that this text names.\n\n"
_CLOSING = "\n\nThese are magic numbers that the text above names.\n"
NEEDLE = "The magic number of {city} is {number}."
SENTENCE = re.compile(r"[^.!?]+[.!?]+\s*")


@dataclass(frozen=True)
class NeedleText:
    """A haystack with its needles and the questions behind it.

    Args:
        text: all of it, answers included.
        answers: characters of the answer to each question.
        needles: city and number of each needle, in the order of the text.
    """

    text: str
    answers: tuple[Span, ...]
    needles: tuple[tuple[str, str], ...]


def needle_items(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    count: int,
    needles: int = 8,
    queries: int = 4,
    seed: int = 0,
) -> list[AnswerItem]:
    """Texts of about one length with needles at sentence ends, at depths that take turns.

    Args:
        documents: of the haystack; its sentences are used in order.
        tokenizer: of the model.
        context: tokens of a text at most.
        count: texts.
        needles: N different cities with different numbers of seven digits.
        queries: R of them that are asked for; the first lies at the depth of the text.
        seed: of places, cities and numbers.

    Returns:
        The items; the answers are the numbers, without blanks.

    Raises:
        UserError: needles and questions alone are longer than `context`, the documents have too
            few sentences, or numbers are out of range.

    Source: the protocol of Ye et al., arXiv 2410.05258, section 3.3, in completion form.
    Differs: which needle lies at the depth is not said there; ours is the first one asked for.
    """
    if not 1 <= queries <= needles <= len(CITIES):
        raise UserError(
            f"queries: expected 1 to needles, and needles up to {len(CITIES)}, "
            f"got {queries} of {needles}"
        )
    sentences = [s for document in documents for s in SENTENCE.findall(document.text)]
    sizes = [len(ids) for ids in tokenizer(sentences, add_special_tokens=False)["input_ids"]]
    items = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        depth = DEPTHS[index % len(DEPTHS)]
        start = int(rng.integers(len(sentences)))
        # needles and questions take what the haystack leaves; a last cut makes it exact
        bare = needle_text([], needles, queries, depth, np.random.default_rng([seed, index]))
        budget = context - len(tokenizer(bare.text)["input_ids"])
        taken = _take(sentences, sizes, start, budget)
        while True:
            built = needle_text(
                taken, needles, queries, depth, np.random.default_rng([seed, index])
            )
            item = encode_answers(built.text, built.answers, tokenizer)
            if len(item.input_ids) <= context or not taken:
                break
            taken = taken[:-1]
        if len(taken) < needles:
            room = sum(_following(sizes, start, needles)) - budget
            raise UserError(
                f"context: expected at least about {context + room:,} tokens, for {needles} "
                f"needles, {queries} questions and as many sentences of text between them, "
                f"got {context}"
            )
        items.append(item)
    return items


def needle_text(
    sentences: Sequence[str],
    needles: int,
    queries: int,
    depth: float,
    rng: np.random.Generator,
) -> NeedleText:
    """Put needles between sentences and questions behind them.

    Args:
        sentences: the haystack; without any, the needles alone.
        needles: number of them.
        queries: number of questions, about different needles.
        depth: place of the first question's needle, 0 the start and 1 the end.
        rng: draws cities, numbers and places.
    """
    body, cities, numbers, order = haystack(
        sentences, needles, [round(depth * len(sentences))], rng
    )
    text, answers = body + _CLOSING, []
    for n in range(min(queries, len(order))):
        text += f"The magic number of {cities[n]} is "
        answers.append((len(text), len(text) + len(numbers[n])))
        text += f"{numbers[n]}.\n"
    return NeedleText(text, tuple(answers), tuple((cities[n], numbers[n]) for n in order))


def haystack(
    sentences: Sequence[str], needles: int, wanted: Sequence[int], rng: np.random.Generator
) -> tuple[str, list[str], list[str], list[int]]:
    """Put needles between sentences.

    Args:
        sentences: the haystack; without any, the needles alone.
        needles: number of them.
        wanted: gaps of the first needles, 0 before the first sentence; no two needles share a gap,
            a later one takes the nearest free one. The other needles lie anywhere.
        rng: draws cities, numbers and places.

    Returns:
        The text, cities, numbers, and the order of the needles in the text.
    """
    cities = [CITIES[n] for n in rng.permutation(len(CITIES))[:needles]]
    numbers = [str(n) for n in _different(rng, needles)]
    gaps = len(sentences) + 1
    places: list[int] = []
    for place in wanted:
        free = [gap for gap in range(gaps) if gap not in places]
        places.append(min(free, key=lambda gap: abs(gap - place)))
    others = [gap for gap in range(gaps) if gap not in places]
    if sentences:
        places = [*places, *rng.permutation(others)[: needles - len(places)].tolist()]
    else:
        places = list(range(needles))
    order = sorted(range(len(places)), key=places.__getitem__)
    at = {places[n]: NEEDLE.format(city=cities[n], number=numbers[n]) + " " for n in order}
    parts = [_OPENING]
    for gap in range(max(gaps, needles)):
        parts.append(at.get(gap, ""))
        if gap < len(sentences):
            parts.append(" ".join(sentences[gap].split()) + " ")
    return "".join(parts).rstrip(), cities, numbers, order


def _different(rng: np.random.Generator, count: int) -> list[int]:
    found: dict[int, None] = {}
    while len(found) < count:
        found[int(rng.integers(1_000_000, 10_000_000))] = None
    return list(found)


def _following(entries: list[Any], start: int, count: int) -> list[Any]:
    """So many entries from a place on, around the end."""
    return [entries[(start + step) % len(entries)] for step in range(count)]


def _take(sentences: list[str], sizes: list[int], start: int, budget: int) -> list[str]:
    """The sentences from a place on that fit."""
    count = used = 0
    for size in _following(sizes, start, len(sizes)):
        used += size
        if used > budget:
            break
        count += 1
    return _following(sentences, start, count)
