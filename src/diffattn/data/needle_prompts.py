"""Prompts of multi-needle retrieval: a context, one question for all cities, one for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from diffattn.data.answers import Span, encode_answers
from diffattn.data.corpus import Document
from diffattn.data.needles import CITIES, NEEDLE, SENTENCE, haystack
from diffattn.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Placed = Literal["first_query", "all_queries", "random"]
PLACED: tuple[str, ...] = ("first_query", "all_queries", "random")
_QUESTIONS = "\n\nThese are magic numbers that the text above names.\n"


@dataclass(frozen=True)
class Question:
    """What is asked behind the context.

    Args:
        cities: that are asked for.
        prompt: tokens that end where the answer starts.
        answers: tokens of each number that could be given there, that of the city first.
    """

    cities: tuple[str, ...]
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NeedlePrompt:
    """A haystack with needles, and the questions about it.

    Args:
        id: cell, length, depth and number of the sample.
        context: [L] tokens, BOS first where the tokenizer puts one.
        needles: city and number of each, in the order of the text.
        spans: tokens of each needle in `context`.
        depth: that was asked for; None where all needles lie anywhere.
        found_at: share of the haystack's characters before the first queried needle.
        together: the question for all queried cities.
        alone: a question for each of them.
    """

    id: str
    context: tuple[int, ...]
    needles: tuple[tuple[str, str], ...]
    spans: tuple[Span, ...]
    depth: float | None
    found_at: float
    together: Question
    alone: tuple[Question, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        """Context and the question for all."""
        return self.context + self.together.prompt


def needle_prompts(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    needles: int,
    queries: int,
    depths: Sequence[float],
    samples: int,
    placed: Placed = "first_query",
    seed: int = 0,
) -> list[NeedlePrompt]:
    """Prompts of one cell (N, R), for every depth so many.

    Args:
        documents: of the haystack; sentences are used in order from a drawn place on.
        tokenizer: of the model; a fast one.
        length: tokens that a prompt and its answer may have together.
        needles: N different cities with different numbers of seven digits.
        queries: R of them that are asked for.
        depths: of the queried needle, 0 the start and 1 the end of the haystack.
        samples: prompts for each depth.
        placed: which needles lie at the depth: the first that is asked for, all that are asked
            for (side by side in neighbouring gaps), or none ("random").
        seed: of places, cities and numbers; the same one gives the same bytes.

    Raises:
        UserError: needles and questions alone are longer than `length`, numbers are out of range,
            or the documents have too few sentences.

    Source: Ye et al., arXiv 2410.05258, section 3.3, after Liu et al., arXiv 2402.08268; which
        needle lies at the depth is not said there.
    """
    if not 1 <= queries <= needles <= len(CITIES):
        raise UserError(
            f"queries: expected 1 to needles, and needles up to {len(CITIES)}, got {queries} of "
            f"{needles}"
        )
    if placed not in PLACED:
        raise UserError(f"placed: expected one of {', '.join(PLACED)}, got {placed!r}")
    sentences = [" ".join(s.split()) for d in documents for s in SENTENCE.findall(d.text)]
    if len(sentences) < needles:
        raise UserError(f"data: expected at least {needles} sentences, got {len(sentences)}")
    sizes = [len(ids) for ids in tokenizer(sentences, add_special_tokens=False)["input_ids"]]
    found = []
    for depth in depths:
        for sample in range(samples):
            key = [seed, length, needles, queries, round(1000 * depth), sample]
            start = int(np.random.default_rng(key).integers(len(sentences)))
            taken = _fitting(sentences, sizes, start, length)
            while True:
                # fewer sentences until prompt and answer fit; then the numbers are drawn alike
                prompt = _prompt(taken, tokenizer, needles, queries, depth, placed, key)
                over = len(prompt.prompt) + _room(prompt) - length
                if over <= 0:
                    break
                if len(taken) <= needles:
                    raise UserError(
                        f"length: expected at least about {length + over:,} tokens for {needles} "
                        f"needles and {queries} questions, got {length:,}"
                    )
                taken = taken[: min(len(taken) - 1, len(taken) - over // max(sizes))]
            found.append(prompt)
    return found


def _room(prompt: NeedlePrompt) -> int:
    """Tokens of the longest answer: every number, and what joins them."""
    longest = max(len(ids) for ids in prompt.together.answers)
    return len(prompt.together.cities) * (longest + 3)


def _fitting(sentences: list[str], sizes: list[int], start: int, length: int) -> list[str]:
    taken, used = [], 0
    for step in range(len(sentences)):
        place = (start + step) % len(sentences)
        used += sizes[place]
        if used > length:
            break
        taken.append(sentences[place])
    return taken


def _prompt(
    sentences: list[str],
    tokenizer: PreTrainedTokenizerBase,
    needles: int,
    queries: int,
    depth: float,
    placed: str,
    key: list[int],
) -> NeedlePrompt:
    gap = _gap_at(sentences, depth)
    wanted = {"first_query": [gap], "all_queries": [gap] * queries, "random": []}[placed]
    text, cities, numbers, order = haystack(sentences, needles, wanted, np.random.default_rng(key))
    text += _QUESTIONS
    told = [NEEDLE.format(city=cities[n], number=numbers[n]) for n in order]
    marks = [(text.index(needle), text.index(needle) + len(needle)) for needle in told]
    encoded = encode_answers(text, marks, tokenizer)
    body = text.index("\n\n") + 2, text.rindex(_QUESTIONS)
    first = marks[order.index(0)][0]
    before = sum(stop - start + 1 for start, stop in marks if stop <= first)
    whole = body[1] - body[0] - sum(stop - start + 1 for start, stop in marks)
    names = f"N{needles}-R{queries}-L{key[1]}-d{depth:g}-{key[-1]}"
    return NeedlePrompt(
        id=names,
        context=tuple(encoded.input_ids.tolist()),
        needles=tuple((cities[n], numbers[n]) for n in order),
        spans=encoded.spans,
        depth=None if placed == "random" else depth,
        found_at=(first - body[0] - before) / max(1, whole),
        together=_question(cities[:queries], numbers[:queries], numbers, tokenizer),
        alone=tuple(
            _question([cities[n]], [numbers[n]], numbers, tokenizer) for n in range(queries)
        ),
    )


def _gap_at(sentences: list[str], depth: float) -> int:
    """The gap between sentences that is nearest to a share of the characters."""
    ends = np.cumsum([0, *(len(sentence) + 1 for sentence in sentences)])
    return int(np.abs(ends - depth * ends[-1]).argmin())


def _question(
    cities: Sequence[str], own: Sequence[str], numbers: Sequence[str], tokenizer: object
) -> Question:
    """A question, and the tokens of every number as an answer to it."""
    listed = cities[0] if len(cities) == 1 else f"{', '.join(cities[:-1])} and {cities[-1]}"
    text = (
        f"The magic number of {listed} is"
        if len(cities) == 1
        else (f"The magic numbers of {listed} are")
    )
    others = [number for number in numbers if number not in own]
    ends = [
        tokenizer(f"{text} {number}", add_special_tokens=False)["input_ids"]  # pyright: ignore
        for number in (*own, *others)
    ]
    shared = 0  # a tokenizer may join the blank before a number to what stands before it
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore
    while shared < len(bare) and all(
        ids[shared : shared + 1] == bare[shared : shared + 1] for ids in ends
    ):
        shared += 1
    return Question(tuple(cities), tuple(bare[:shared]), tuple(tuple(ids[shared:]) for ids in ends))
