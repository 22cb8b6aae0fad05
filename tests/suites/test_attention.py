"""Shares of attention: by rows that look at the answer, elsewhere, or anywhere."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diffattn.data import Document, load_tokenizer, train_tokenizer
from diffattn.dex.base import load_base
from diffattn.errors import UserError
from diffattn.evaluation.attention_rows import Rows
from diffattn.evaluation.bootstrap import bootstrap_interval, verdict_of
from diffattn.suites import attention
from diffattn.suites.subject import Loaded
from diffattn.suites.text import Text

FAST = {"cells": ("4x1",), "lengths": (900,), "depths": (0.0, 1.0), "samples": 2}


@pytest.fixture(scope="module")
def text():
    documents = [Document("d", " ".join(f"Line {n} is short." for n in range(400)))]
    return Text(documents, documents, "a text")


@pytest.fixture(scope="module")
def tokenizer(text, with_bos):
    return with_bos(train_tokenizer([d.text for d in text.documents], 290))


def measured(monkeypatch, text, tokenizer, weigh, **change):
    """Records of a model whose only row is what `weigh` makes of a prompt."""
    settings = attention.Settings(**{**FAST, **change})
    loaded = Loaded(SimpleNamespace(), tokenizer, None)
    items = attention.items(settings, loaded, text)
    by_context = {item.context: item for item in items}

    def rows(context, ids):
        weights = weigh(by_context[context])[None].float()
        return [Rows(weights, weights, None)]

    monkeypatch.setattr(attention, "ReadContext", lambda model, ids: ids)
    monkeypatch.setattr(attention, "last_rows", rows)
    return list(attention.measure(settings, loaded, items))


def span_of(item, which):
    places = [n for n, (c, _) in enumerate(item.needles) if (c in item.together.cities) == which]
    return [item.spans[place] for place in places]


def on(spans, item):
    row = torch.zeros(len(item.prompt))
    for start, stop in spans:
        row[start:stop] = 1
    return row / row.sum()


def test_oracle_looks_at_the_answer_alone(monkeypatch, text, tokenizer):
    found = measured(monkeypatch, text, tokenizer, lambda item: on(span_of(item, True), item))
    assert len(found) == 4
    for record in found:
        assert record["values"]["answer"] == pytest.approx(1)
        assert record["values"]["noise"] == pytest.approx(0, abs=1e-6)


def test_distractor_looks_at_other_needles(monkeypatch, text, tokenizer):
    found = measured(monkeypatch, text, tokenizer, lambda item: on(span_of(item, False), item))
    for record in found:  # neighbouring needles may share a token
        assert record["values"]["answer"] < 0.03
        assert record["values"]["noise"] > 0.97


def test_a_drawn_needle_is_at_chance(monkeypatch, text, tokenizer):
    rng = np.random.default_rng(0)

    def weigh(item):
        return on([item.spans[rng.integers(len(item.spans))]], item)

    found = measured(monkeypatch, text, tokenizer, weigh, samples=40)
    answers = [record["values"]["answer"] for record in found]
    assert np.mean(answers) == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / len(answers)) ** 0.5)


def test_row_sums_near_zero_are_flagged(monkeypatch, text, tokenizer):
    def weigh(item):
        row = torch.full((len(item.prompt),), 1.0)
        row[1::2] = -1.0
        row[0] += 0.01 - row.sum()
        return row

    plain = measured(monkeypatch, text, tokenizer, weigh)
    assert not any(record["flags"] for record in plain)
    flagged = measured(monkeypatch, text, tokenizer, weigh, rule="rowsum")
    assert all(record["flags"] == ["a row sum is near 0"] for record in flagged)


def test_a_real_model_and_itself_are_no_different(place, text):
    model, tokenizer = load_base(place / "one"), load_tokenizer(place / "one")

    settings = attention.Settings(**FAST)
    loaded = Loaded(model, tokenizer, 1024)
    items = attention.items(settings, loaded, text)
    runs = [list(attention.measure(settings, loaded, items)) for _ in range(2)]
    for claim in attention.claims(settings):
        key = claim.measure.name
        one, two = (np.array([[r["values"][key] for r in run]]) for run in runs)
        assert (one > 0).all()
        assert (one < 1).all()
        for seed in range(200):
            interval = bootstrap_interval(two - one, seed=seed, draws=20)
            verdict = verdict_of(interval, better=claim.measure.better, margin=1e-9)
            assert verdict == "no difference"
    for record in runs[0]:
        parts = ("answer", "noise", "first", "query")
        assert sum(record["values"][part] for part in parts) == pytest.approx(1)
    measured = {"one": [{record["id"]: record for record in runs[0]}]}
    assert len(attention.tables(settings, measured)[0].rows) == 2
    assert "<svg" in attention.figures(settings, measured)[0].svg


def test_an_unknown_rule_is_refused():
    with pytest.raises(UserError, match=r"attention\.rule: expected one of abs"):
        attention.Settings(rule="sum")
