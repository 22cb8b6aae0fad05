"""Texts with needles."""

import numpy as np
import pytest

pytest.importorskip("transformers", reason="tokenizers need the extra hf")

from diffattn.data import load_documents, needle_items, train_tokenizer
from diffattn.data.corpus import Document
from diffattn.data.needles import CITIES, DEPTHS, needle_text
from diffattn.errors import UserError

SENTENCES = [f"Sentence number {n} says nothing. " for n in range(40)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([document.text for document in load_documents(None)[:4]], 400)


def test_cities_are_different():
    assert len(set(CITIES)) == len(CITIES)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_text_holds_each_needle_once_and_the_first_asked_at_its_depth(depth):
    built = needle_text(SENTENCES, 5, 3, depth, np.random.default_rng(0))
    body, questions = built.text.split("\n\nThese are")
    assert len({city for city, _ in built.needles}) == len({n for _, n in built.needles}) == 5
    for city, number in built.needles:
        assert body.count(f"The magic number of {city} is {number}.") == 1
    numbers = dict(built.needles)
    asked = [built.text[start:stop] for start, stop in built.answers]
    assert len(asked) == 3
    assert all(questions.count(number) == 1 for number in asked)
    first = next(city for city, number in numbers.items() if number == asked[0])
    before = body.index(f"The magic number of {first}")
    told = sum(sentence.strip() in body[:before] for sentence in SENTENCES)
    assert told == round(depth * len(SENTENCES))
    for start, stop in built.answers:
        assert built.text[:start].endswith(" is ")
        assert built.text[stop] == "."


def test_needles_never_share_a_gap():
    built = needle_text(SENTENCES, 8, 4, 0.5, np.random.default_rng(3))
    lines = [" ".join(part.split()) for part in built.text.split("The magic number of ")[1:8]]
    assert all("Sentence number" in line for line in lines)


def test_items_fit_and_their_spans_are_the_numbers(tokenizer):
    documents = [Document("d", " ".join(SENTENCES))]
    items = needle_items(documents, tokenizer, context=900, count=5, needles=4, queries=2)
    assert len({item.input_ids.tobytes() for item in items}) == 5
    for item in items:
        assert 700 < len(item.input_ids) <= 900
        text = tokenizer.decode(item.input_ids)
        asked = [tokenizer.decode(item.input_ids[start:stop]) for start, stop in item.spans]
        assert len(asked) == 2
        for number in asked:
            digits = number.strip(" .\n")
            assert len(digits) == 7
            assert text.count(digits) == 2


def test_the_same_seed_gives_the_same_items(tokenizer):
    documents = [Document("d", " ".join(SENTENCES))]
    size = {"context": 700, "count": 2, "needles": 3, "queries": 1}
    first, again, other = (
        needle_items(documents, tokenizer, seed=seed, **size) for seed in (0, 0, 1)
    )
    for a, b, c in zip(first, again, other, strict=True):
        assert a.input_ids.tolist() == b.input_ids.tolist() != c.input_ids.tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context": 60}, "context: "),
        ({"queries": 9}, "queries: expected 1 to needles"),
        ({"needles": 100}, "needles up to 64"),
    ],
)
def test_what_cannot_be_is_refused(tokenizer, change, says):
    documents = [Document("d", " ".join(SENTENCES))]
    with pytest.raises(UserError, match=says):
        needle_items(documents, tokenizer, **{"context": 900, "count": 1, **change})
