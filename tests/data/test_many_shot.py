"""Lists of examples with their classes."""

from collections import Counter

import pytest

pytest.importorskip("transformers", reason="tokenizers need the extra hf")

from diffattn.data import many_shot_items, query_documents, train_tokenizer
from diffattn.data.many_shot import bundled_queries
from diffattn.errors import UserError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([document.text for document in query_documents()[:20]], 600)


def test_the_bundled_queries_have_77_classes_and_no_query_twice():
    queries = bundled_queries()
    assert len({label for _, label in queries}) == 77
    assert max(Counter(text for text, _ in queries).values()) == 1


def test_documents_hold_every_query_under_its_class():
    documents = query_documents([("a", "x"), ("b", "y"), ("c", "x")])
    assert [(d.name, d.text) for d in documents] == [("x", "a\nc"), ("y", "b")]


def test_a_list_fits_and_its_answers_are_the_first_tokens_of_its_labels(tokenizer):
    items = many_shot_items(tokenizer, context=800, count=3, classes=5)
    for item in items:
        assert 600 < len(item.input_ids) <= 800
        assert len(item.choices) == len(set(item.choices)) == 5
        text = tokenizer.decode(item.input_ids)
        shots = text.count("intent:")
        assert len(item.spans) == shots - shots // 2
        for start, stop in item.spans:
            assert stop == start + 1
            assert int(item.input_ids[start]) in item.choices
            assert tokenizer.decode(item.input_ids[:start]).rstrip().endswith("intent:")
    assert len({item.choices for item in items}) == 3


def test_a_perfect_table_of_the_examples_would_answer_all(tokenizer):
    examples = [(f"{color} {n}", color) for color in ("red", "blue", "green") for n in range(20)]
    (item,) = many_shot_items(tokenizer, context=600, count=1, classes=3, examples=examples)
    for start, _ in item.spans:
        query = tokenizer.decode(item.input_ids[:start]).rsplit("query: ", 1)[1]
        answer = tokenizer.decode([item.input_ids[start]]).strip()
        assert query.startswith(answer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context": 10}, "no list of two examples fits in 10 tokens"),
        ({"examples": [("a", "same"), ("b", "same")]}, "two labels that start with different"),
    ],
)
def test_what_cannot_be_is_refused(tokenizer, change, says):
    with pytest.raises(UserError, match=says):
        many_shot_items(tokenizer, **{"context": 400, "count": 1, **change})
