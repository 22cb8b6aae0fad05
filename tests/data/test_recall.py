"""Laws of the generated recall task."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from diffattn.data import (
    Document,
    RecallItem,
    RecallSequence,
    RecallSpec,
    RecallStream,
    RecallTokens,
    TokenFile,
    distractor,
    load_documents,
    make_recall,
    oracle,
    recall_grid,
    train_tokenizer,
    write_tokens,
)
from diffattn.data.placement import draw_places
from diffattn.errors import UserError

pytest.importorskip("transformers")

DOCUMENTS = [Document(d.name, d.text[:5_000]) for d in load_documents(None)[:20]]
TOKENIZER = train_tokenizer([document.text for document in DOCUMENTS], 400)
BOS = TOKENIZER.bos_token_id
EOS = TOKENIZER.eos_token_id
TOKENS = RecallTokens(first_id=400, classes=8, values=5)
SPECS = [RecallSpec(*sizes) for sizes in ((64, 1, 1), (300, 4, 2), (300, 8, 8), (33, 8, 8))]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return write_tokens(DOCUMENTS, TOKENIZER, tmp_path_factory.mktemp("tokens") / "text.bin")


def make(spec: RecallSpec, seed: int, depth: float | None = None) -> RecallSequence:
    rng = np.random.default_rng(seed)
    return make_recall(TOKENS, 3 + np.arange(spec.length) % 300, spec, rng, BOS, depth)


def grid(text: TokenFile, **changes) -> list[RecallItem]:
    arguments = {
        "lengths": [128, 256], "cells": [(1, 1), (6, 2)], "depths": [0.0, 0.5, 1.0],
        "samples": 3, "seed": 7, "bos_id": BOS,
    }  # fmt: skip
    return recall_grid(TOKENS, text, **(arguments | changes))


def class_of(needle: int) -> int:
    return (needle - TOKENS.first_id) // TOKENS.values


def test_token_ids_are_distinct_and_dense() -> None:
    needles = [TOKENS.needle(c, v) for c in range(8) for v in range(5)]
    queries = [TOKENS.query(c) for c in range(8)]
    assert needles + queries == list(range(400, 400 + TOKENS.count))
    assert RecallTokens(0).count == 272


@pytest.mark.parametrize("depth", [None, 0.0, 0.37, 1.0])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_layout(spec: RecallSpec, seed: int, depth: float | None) -> None:
    sequence = make(spec, seed, depth)
    ids, n, r = sequence.input_ids, spec.needles, spec.queries
    assert ids.shape == sequence.labels.shape == (spec.length,)
    assert ids.dtype == sequence.labels.dtype == np.int64
    assert np.flatnonzero(ids == BOS).tolist() == [0]

    body = ids[1 : spec.length - 2 * r]
    needles = body[body >= TOKENS.first_id]
    assert len(needles) == n
    assert len({class_of(needle) for needle in needles}) == n
    haystack = body[body < TOKENS.first_id]
    assert np.array_equal(haystack, 3 + np.arange(len(haystack)) % 300)
    assert len(haystack) == spec.text_tokens

    positions = sequence.needle_positions
    assert sorted(ids[positions]) == sorted(needles)
    assert np.diff(np.sort(positions)).min(initial=2) >= 2

    questions = ids[spec.length - 2 * r :].reshape(r, 2)
    assert sequence.query_positions.tolist() == list(range(spec.length - 2 * r, spec.length, 2))
    assert np.array_equal(questions[:, 1], sequence.answers)
    for (query, answer), position in zip(questions, positions[:r], strict=True):
        assert answer == ids[position]
        assert query == TOKENS.query(class_of(answer))
        assert np.count_nonzero(body == answer) == 1

    labelled = np.flatnonzero(sequence.labels != -100)
    assert np.array_equal(labelled, sequence.query_positions + 1)
    assert np.array_equal(sequence.labels[labelled], sequence.answers)
    assert np.array_equal(sequence.labels[labelled], ids[labelled])


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.25, 0.5, 0.731, 1.0])
@pytest.mark.parametrize(("needles", "queries"), [(1, 1), (8, 3)])
def test_first_needle_stands_at_the_asked_depth(depth: float, needles: int, queries: int) -> None:
    spec = RecallSpec(400, needles, queries)
    for seed in range(20):
        sequence = make(spec, seed, depth)
        first, last = 1, spec.length - 2 * queries - 1
        position = int(sequence.needle_positions[0])
        assert abs((position - first) / (last - first) - depth) <= 0.01
        assert sequence.depths[0] == pytest.approx((position - first) / (last - first))
        answer = sequence.answers[0]
        assert np.flatnonzero(sequence.input_ids[: last + 1] == answer).tolist() == [position]
        if depth in (0.0, 1.0):
            assert position == (first if depth == 0 else last)


@pytest.mark.parametrize(("depth", "first"), [(None, None), (0.0, 0), (0.2, 2), (1.0, 9)])
def test_arrangements_are_uniform(depth: float | None, first: int | None) -> None:
    possible = {
        chosen
        for chosen in itertools.combinations(range(10), 3)
        if all(b - a >= 2 for a, b in itertools.pairwise(chosen))
        and (first is None or first in chosen)
    }
    rng = np.random.default_rng(0)
    draws = [draw_places(rng, 10, 3, depth).tolist() for _ in range(6_000)]
    drawn = Counter(tuple(sorted(places)) for places in draws)
    assert set(drawn) == possible
    expected = 6_000 / len(possible)
    assert all(abs(count - expected) < 4.5 * expected**0.5 for count in drawn.values())
    if first is not None:
        assert {places[0] for places in draws} == {first}


def test_random_depths_are_uniform() -> None:
    depths = np.array([make(RecallSpec(200, 6, 2), seed).depths for seed in range(400)])
    assert np.all(np.abs(depths.mean(axis=0) - 0.5) < 0.07)
    assert depths.min() < 0.02
    assert depths.max() > 0.98


def test_classes_and_values_are_all_used() -> None:
    answers = {int(a) for seed in range(400) for a in make(SPECS[1], seed).answers}
    assert answers == set(range(400, 440))


def test_same_state_same_bytes() -> None:
    for spec in SPECS:
        first, again, other = make(spec, 1), make(spec, 1), make(spec, 2)
        assert first.input_ids.tobytes() == again.input_ids.tobytes()
        assert first.labels.tobytes() == again.labels.tobytes()
        assert first.input_ids.tobytes() != other.input_ids.tobytes()


def test_stream_is_a_function_of_seed_and_index(text: TokenFile) -> None:
    def stream(seed: int) -> RecallStream:
        return RecallStream(TOKENS, text, RecallSpec(80, 4, 2), seed, BOS)

    rows = [stream(3)[i].input_ids.tobytes() for i in range(50)]
    backwards = stream(3)
    assert [backwards[i].input_ids.tobytes() for i in reversed(range(50))] == rows[::-1]
    assert len(set(rows)) == 50
    assert rows[7] != stream(4)[7].input_ids.tobytes()
    assert stream(3)[10**12].input_ids.shape == (80,)
    with pytest.raises(IndexError):
        stream(3)[-1]


def test_haystack_is_text_without_specials(text: TokenFile) -> None:
    plain = text.read(0, text.tokens)
    plain = plain[(plain != BOS) & (plain != EOS)]
    circular = np.concatenate([plain, plain]).astype("<u2").tobytes()
    spec = RecallSpec(600, 2, 1)
    stream = RecallStream(TOKENS, text, spec, 0, BOS)
    starts = set()
    for index in range(100):
        ids = stream[index].input_ids
        haystack = ids[(ids < TOKENS.first_id) & (ids != BOS)]
        assert len(haystack) == spec.text_tokens
        starts.add(circular.find(haystack.astype("<u2").tobytes()))
    assert -1 not in starts
    assert len(starts) > 90


def test_haystack_may_be_the_whole_text_but_not_more(tmp_path: Path) -> None:
    short = write_tokens([*DOCUMENTS[:1], Document("b", "end")], TOKENIZER, tmp_path / "t.bin")
    longest = short.text_tokens + 4
    stream = RecallStream(TOKENS, short, RecallSpec(longest, 1, 1), 0, BOS)
    plain = short.read(0, short.tokens)
    for index in range(5):
        ids = stream[index].input_ids
        assert sorted(ids[(ids < 400) & (ids != BOS)]) == sorted(
            plain[(plain != BOS) & (plain != EOS)]
        )
    with pytest.raises(UserError, match=r"^length: t\.bin has [\d,]+ text tokens, fewer than"):
        RecallStream(TOKENS, short, RecallSpec(longest + 1, 1, 1), 0, BOS)


def test_grid_has_every_cell_in_stable_order(text: TokenFile) -> None:
    items = grid(text)
    keys = [(i.length, (i.needles, i.queries), i.depth, i.sample) for i in items]
    assert keys == list(itertools.product([128, 256], [(1, 1), (6, 2)], [0.0, 0.5, 1.0], range(3)))
    assert all(len(item.sequence.input_ids) == item.length for item in items)
    assert all(len(item.sequence.answers) == item.queries for item in items)
    assert all(abs(item.sequence.depths[0] - item.depth) <= 0.01 for item in items)
    assert len({item.sequence.input_ids.tobytes() for item in items}) == len(items)


def test_grid_items_do_not_depend_on_the_rest_of_the_grid(text: TokenFile) -> None:
    whole = {
        (i.length, i.needles, i.depth, i.sample): i.sequence.input_ids.tobytes() for i in grid(text)
    }
    part = grid(text, lengths=[256], cells=[(6, 2)], depths=[1.0, 0.5], samples=2)
    for item in part:
        key = (item.length, item.needles, item.depth, item.sample)
        assert item.sequence.input_ids.tobytes() == whole[key]
    assert part[0].sequence.input_ids.tobytes() not in {
        item.sequence.input_ids.tobytes() for item in grid(text, seed=8)
    }


def test_grid_with_random_depth(text: TokenFile) -> None:
    items = grid(text, depths=[None], samples=10)
    assert all(item.depth is None for item in items)
    assert len({item.sequence.depths[0] for item in items}) > 20


def test_oracle_is_always_right_and_distractor_never(text: TokenFile) -> None:
    for item in grid(text, cells=[(1, 1), (2, 1), (4, 4), (8, 3)]):
        answers = item.sequence.answers
        assert np.array_equal(oracle(item), answers)
        wrong = distractor(item)
        assert wrong.shape == answers.shape
        assert not np.any(wrong == answers)
        in_haystack = item.sequence.input_ids[item.sequence.needle_positions]
        if item.needles > 1:
            assert set(wrong) <= set(in_haystack)
        else:
            assert class_of(int(wrong[0])) == class_of(int(answers[0]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64, 0, 0), "^needles: expected at least 1, got 0"),
        ((64, 2, 3), "^queries: expected 1 to 2, .* got 3"),
        ((64, 2, 0), "^queries: expected 1 to 2, .* got 0"),
        ((32, 8, 8), "^length: expected at least 33 for 8 needles and 8 queries"),
    ],
)
def test_bad_specs(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RecallSpec(*sizes)


def test_bad_tokens() -> None:
    for name, value in (("first_id", -1), ("classes", 0), ("values", 1)):
        with pytest.raises(UserError, match=f"^{name}: expected .* got {value}"):
            RecallTokens(**({"first_id": 0} | {name: value}))


def test_bad_arguments(text: TokenFile) -> None:
    rng = np.random.default_rng(0)
    spec = RecallSpec(64, 2, 1)
    haystack = np.full(64, 3)
    with pytest.raises(UserError, match=r"^haystack: expected 59 text tokens, got 58"):
        make_recall(TOKENS, haystack[:58], spec, rng, BOS)
    with pytest.raises(UserError, match=r"^first_id: expected more than .* 400, got 400"):
        make_recall(TOKENS, np.full(64, 400), spec, rng, BOS)
    for depth in (-0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match=r"^depth: expected 0 to 1"):
            make_recall(TOKENS, haystack, spec, rng, BOS, depth)
    many = RecallSpec(64, 9, 1)
    with pytest.raises(UserError, match=r"^needles: expected at most 8"):
        make_recall(TOKENS, haystack, many, rng, BOS)
    with pytest.raises(UserError, match=r"^needles: expected at most 8"):
        RecallStream(TOKENS, text, many, 0, BOS)
    with pytest.raises(UserError, match=r"^seed: "):
        RecallStream(TOKENS, text, spec, -1, BOS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lengths", []), ("cells", []), ("depths", []), ("samples", 0), ("seed", -1),
        ("length", {"lengths": [10**7]}), ("depth", {"depths": [2.0]}),
        ("depth", {"depths": [float("nan")]}), ("needles", {"cells": [(9, 1)]}),
    ],
)  # fmt: skip
def test_bad_grids(text: TokenFile, name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{name}: "):
        grid(text, **(value if isinstance(value, dict) else {name: value}))
