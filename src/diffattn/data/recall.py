"""Multi-needle recall: retrieve some of the one-token needles hidden in text.

A sequence is BOS, a haystack of text in which N needle tokens stand at separate places, then R
questions: a query token, followed by its answer. Each needle token belongs to a class and carries
a value; a query token names a class, and the answer is that class's needle, repeated. The tokens
of needles and queries lie above the tokenizer's ids, so text cannot contain them.

Source: the task is ours, after the multi-needle retrieval of Ye et al., arXiv 2410.05258,
section 3.4 (N needles, R of them queried, by length and depth).
Differs: the paper hides sentences with numbers; ours are single tokens, so that a model of a few
layers can learn the task and each answer is one prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diffattn.data.packing import IntArray, TokenFile
from diffattn.data.placement import draw_places
from diffattn.errors import UserError

_IGNORED = -100  # the label that Hugging Face losses skip


@dataclass(frozen=True, slots=True)
class RecallTokens:
    """The token ids of needles, followed by those of queries.

    Args:
        first_id: lowest of the ids, at least the size of the text's vocabulary.
        classes: what a query can ask for.
        values: answers a class can have, at least 2.
    """

    first_id: int
    classes: int = 16
    values: int = 16

    def __post_init__(self) -> None:
        """Check the counts."""
        if self.first_id < 0:
            raise UserError(f"first_id: expected 0 or more, got {self.first_id}")
        if self.classes < 1:
            raise UserError(f"classes: expected at least 1, got {self.classes}")
        if self.values < 2:
            raise UserError(f"values: expected at least 2, got {self.values}")

    @property
    def count(self) -> int:
        """Ids in all; a model needs `first_id + count` of them."""
        return self.classes * self.values + self.classes

    def needle(self, class_index: int, value: int) -> int:
        """Return the id of the needle of a class with a value."""
        return self.first_id + class_index * self.values + value

    def query(self, class_index: int) -> int:
        """Return the id of the token that asks for a class."""
        return self.first_id + self.classes * self.values + class_index


@dataclass(frozen=True, slots=True)
class RecallSpec:
    """The size of a recall sequence.

    Args:
        length: tokens of the whole sequence.
        needles: needles in the haystack (N in the paper).
        queries: questions, each about another needle (R in the paper).
    """

    length: int
    needles: int
    queries: int

    def __post_init__(self) -> None:
        """Check that the parts fit."""
        if self.needles < 1:
            raise UserError(f"needles: expected at least 1, got {self.needles}")
        if not 1 <= self.queries <= self.needles:
            raise UserError(
                f"queries: expected 1 to {self.needles}, the number of needles, got {self.queries}"
            )
        if self.text_tokens < self.needles:
            shortest = self.length - self.text_tokens + self.needles
            raise UserError(
                f"length: expected at least {shortest} for {self.needles} needles and "
                f"{self.queries} queries, with one text token per needle, got {self.length}"
            )

    @property
    def text_tokens(self) -> int:
        """Text tokens in the haystack."""
        return self.length - 1 - self.needles - 2 * self.queries


@dataclass(frozen=True, slots=True, eq=False)
class RecallSequence:
    """One sequence with the places of its parts.

    Args:
        input_ids: [length] token ids.
        labels: [length] the answer where an answer stands, -100 elsewhere; not shifted.
        needle_positions: [needles] the queried needles first, in the order of the questions.
        query_positions: [queries] of each query token, whose prediction is the answer.
        answers: [queries] token ids of the right answers.
        depths: [needles] as `needle_positions`, from 0 (first place after BOS) to 1 (last place
            before the questions).
    """

    input_ids: IntArray
    labels: IntArray
    needle_positions: IntArray
    query_positions: IntArray
    answers: IntArray
    depths: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class RecallItem:
    """One sequence of the evaluation grid with its cell.

    Args:
        length: tokens of the sequence.
        needles: needles in the haystack.
        queries: questions.
        depth: asked for the first queried needle; None if its place was drawn.
        sample: number within the cell, from 0.
        tokens: ids that the sequence uses.
        sequence: the sequence itself.
    """

    length: int
    needles: int
    queries: int
    depth: float | None
    sample: int
    tokens: RecallTokens
    sequence: RecallSequence


class RecallStream:
    """An endless stream of recall sequences, item i a function of seed, size, i alone."""

    def __init__(
        self, tokens: RecallTokens, text: TokenFile, spec: RecallSpec, seed: int, bos_id: int
    ) -> None:
        """Set up the stream.

        Args:
            tokens: ids of needles and queries.
            text: where haystacks are cut from, at random places; special tokens are removed.
            spec: size of each sequence.
            seed: of the stream.
            bos_id: starts each sequence.

        Raises:
            UserError: more needles than classes, too little text, or a negative seed.
        """
        _check_classes(tokens, spec)
        _check_text(text, spec)
        _check_seed(seed)
        self.tokens = tokens
        self.text = text
        self.spec = spec
        self.seed = seed
        self.bos_id = bos_id

    def __getitem__(self, index: int) -> RecallSequence:
        """Return sequence `index`.

        Args:
            index: 0 or more, without upper limit.

        Returns:
            The sequence, its needles at random places.

        Raises:
            IndexError: `index` is negative.
        """
        if index < 0:
            raise IndexError(f"recall sequence {index}")
        rng = np.random.default_rng([self.seed, self.spec.length, index])
        haystack = _cut_haystack(self.text, self.spec.text_tokens, rng, self.bos_id)
        return make_recall(self.tokens, haystack, self.spec, rng, self.bos_id)


def make_recall(
    tokens: RecallTokens,
    haystack: IntArray,
    spec: RecallSpec,
    rng: np.random.Generator,
    bos_id: int,
    depth: float | None = None,
) -> RecallSequence:
    """Hide needles in a haystack, then ask for some of them.

    With B = `spec.text_tokens + spec.needles` places between BOS and the first question, place p
    is position 1 + p and has depth p / (B - 1). No two needles are neighbours; their classes
    differ. The first queried needle stands at the place nearest to `depth`; given that, all
    arrangements of the others are equally likely.

    Args:
        tokens: ids of needles and queries.
        haystack: [spec.text_tokens or more] text token ids, of which the first are used.
        spec: size of the sequence.
        rng: drawn from; its state decides the sequence.
        bos_id: starts the sequence.
        depth: of the first queried needle, from 0 (right after BOS) to 1 (right before the
            questions); None means a random place.

    Returns:
        The sequence, exactly `spec.length` tokens long.

    Raises:
        UserError: more needles than classes, a short haystack, a haystack with ids of needles, or
            a depth outside [0, 1].
    """
    _check_classes(tokens, spec)
    _check_depth(depth)
    text = haystack[: spec.text_tokens]
    if len(text) < spec.text_tokens:
        raise UserError(f"haystack: expected {spec.text_tokens} text tokens, got {len(text)}")
    if text.max() >= tokens.first_id:
        raise UserError(
            f"first_id: expected more than the text's largest id {text.max()}, "
            f"got {tokens.first_id}"
        )

    places = spec.text_tokens + spec.needles
    classes = rng.permutation(tokens.classes)[: spec.needles]
    values = rng.integers(tokens.values, size=spec.needles)
    needle_places = draw_places(rng, places, spec.needles, depth)
    needle_positions = 1 + needle_places
    query_positions = 1 + places + 2 * np.arange(spec.queries)
    needle_ids = np.array([tokens.needle(*pair) for pair in zip(classes, values, strict=True)])
    answers = needle_ids[: spec.queries]

    input_ids = np.empty(spec.length, dtype=np.int64)
    input_ids[0] = bos_id
    input_ids[np.delete(np.arange(1, 1 + places), needle_places)] = text
    input_ids[needle_positions] = needle_ids
    input_ids[query_positions] = [tokens.query(index) for index in classes[: spec.queries]]
    input_ids[query_positions + 1] = answers
    labels = np.full(spec.length, _IGNORED, dtype=np.int64)
    labels[query_positions + 1] = answers
    return RecallSequence(
        input_ids, labels, needle_positions, query_positions, answers, needle_places / (places - 1)
    )


def recall_grid(
    tokens: RecallTokens,
    text: TokenFile,
    *,
    lengths: Sequence[int],
    cells: Sequence[tuple[int, int]],
    depths: Sequence[float | None],
    samples: int,
    seed: int,
    bos_id: int,
) -> list[RecallItem]:
    """Make the evaluation sequences of every length, cell, depth.

    A sequence depends on the seed with its own cell alone, so a larger grid holds the items of a
    smaller one unchanged.

    Args:
        tokens: ids of needles and queries.
        text: where haystacks are cut from; held-out text.
        lengths: of the sequences, in tokens.
        cells: pairs of needles (N) with queries (R).
        depths: of the first queried needle, from 0 to 1; None means a random place.
        samples: sequences per length, cell, depth.
        seed: of the grid.
        bos_id: starts each sequence.

    Returns:
        All sequences, ordered by length, cell, depth, sample as given.

    Raises:
        UserError: an empty axis, a negative seed, or sizes that do not fit.
    """
    for name, count in (
        ("lengths", len(lengths)),
        ("cells", len(cells)),
        ("depths", len(depths)),
        ("samples", samples),
    ):
        if count < 1:
            raise UserError(f"{name}: expected at least 1, got {count}")
    _check_seed(seed)
    for depth in depths:
        _check_depth(depth)
    items = []
    for length in lengths:
        for needles, queries in cells:
            spec = RecallSpec(length, needles, queries)
            _check_text(text, spec)
            for depth in depths:
                for sample in range(samples):
                    rng = np.random.default_rng(_grid_key(seed, spec, depth, sample))
                    haystack = _cut_haystack(text, spec.text_tokens, rng, bos_id)
                    sequence = make_recall(tokens, haystack, spec, rng, bos_id, depth)
                    items.append(
                        RecallItem(length, needles, queries, depth, sample, tokens, sequence)
                    )
    return items


def oracle(item: RecallItem) -> IntArray:
    """Predict what a perfect reader would: the tokens at the queried needles' places.

    Args:
        item: of the grid.

    Returns:
        [queries] token ids, all right.
    """
    return item.sequence.input_ids[item.sequence.needle_positions[: item.queries]]


def distractor(item: RecallItem) -> IntArray:
    """Predict what a reader that confuses needles would.

    Args:
        item: of the grid.

    Returns:
        [queries] token ids, all wrong: for each query the needle of another class in the same
        haystack; with a single needle, its class with another value.
    """
    needles = item.sequence.input_ids[item.sequence.needle_positions]
    if item.needles > 1:
        return np.roll(needles, -1)[: item.queries]
    class_index, value = divmod(int(needles[0]) - item.tokens.first_id, item.tokens.values)
    return np.array([item.tokens.needle(class_index, (value + 1) % item.tokens.values)])


def _check_classes(tokens: RecallTokens, spec: RecallSpec) -> None:
    """Refuse more needles than there are classes."""
    if spec.needles > tokens.classes:
        raise UserError(
            f"needles: expected at most {tokens.classes}, the number of classes, got {spec.needles}"
        )


def _check_text(text: TokenFile, spec: RecallSpec) -> None:
    """Refuse a text that is shorter than one haystack."""
    if text.text_tokens < spec.text_tokens:
        raise UserError(
            f"length: {text.path.name} has {text.text_tokens:,} text tokens, fewer than the "
            f"{spec.text_tokens:,} of a recall sequence of length {spec.length:,}"
        )


def _check_seed(seed: int) -> None:
    """Refuse a negative seed."""
    if seed < 0:
        raise UserError(f"seed: expected 0 or more, got {seed}")


def _check_depth(depth: float | None) -> None:
    """Refuse a depth that is no fraction of the haystack."""
    if depth is not None and not 0 <= depth <= 1:
        raise UserError(f"depth: expected 0 to 1, got {depth}")


def _grid_key(seed: int, spec: RecallSpec, depth: float | None, sample: int) -> list[int]:
    """Return the numbers that seed one sequence of the grid."""
    millionths = 0 if depth is None else 1 + round(depth * 1_000_000)
    return [seed, spec.length, spec.needles, spec.queries, millionths, sample]


def _cut_haystack(text: TokenFile, count: int, rng: np.random.Generator, bos_id: int) -> IntArray:
    """Cut text tokens at a random place, going on at the start of the file after its end.

    Args:
        text: cut from; special tokens are left out.
        count: tokens wanted.
        rng: draws the place.
        bos_id: left out as well.

    Returns:
        [count] token ids; fewer only if the whole file holds fewer.
    """
    specials = [special for special in (text.bos_id, text.eos_id, bos_id) if special is not None]
    start = int(rng.integers(text.tokens))
    parts: list[IntArray] = []
    found = seen = 0
    while found < count and seen < text.tokens:
        place = (start + seen) % text.tokens
        part = text.read(place, min(place + count, text.tokens, place + text.tokens - seen))
        seen += len(part)
        parts.append(part[~np.isin(part, specials)])
        found += len(parts[-1])
    return np.concatenate(parts)[:count]
