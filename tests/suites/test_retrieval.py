"""Needle prompts and their scores, by models that know, confuse, or guess."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from diffattn.data import Document, load_documents, train_tokenizer
from diffattn.data.needle_prompts import needle_prompts
from diffattn.dex.base import load_base
from diffattn.errors import UserError
from diffattn.evaluation.bootstrap import bootstrap_interval, verdict_of
from diffattn.evaluation.continuations import ReadContext
from diffattn.evaluation.proportions import proportion_interval
from diffattn.suites import retrieval
from diffattn.suites.text import Text

NEEDLE = re.compile(r"The magic number of (\w+) is (\d{7})\.")


@pytest.fixture(scope="module")
def documents():
    return load_documents(None)[:3]


@pytest.fixture(scope="module")
def tokenizer(documents, with_bos):
    return with_bos(train_tokenizer([document.text for document in documents], 400))


def prompts(documents, tokenizer, **change):
    options = {"length": 1500, "needles": 4, "queries": 2, "depths": (0.0, 0.5, 1.0), "samples": 2}
    return needle_prompts(documents, tokenizer, **{**options, **change})


@pytest.mark.parametrize("cell", [(1, 1), (4, 2), (6, 2)])
def test_prompts_keep_the_protocol(documents, tokenizer, cell):
    needles, queries = cell
    found = prompts(documents, tokenizer, needles=needles, queries=queries)
    assert len({prompt.id for prompt in found}) == len(found) == 6
    for prompt in found:
        text = tokenizer.decode(prompt.context)
        assert list(prompt.prompt).count(tokenizer.bos_token_id) == 1
        assert prompt.prompt[0] == tokenizer.bos_token_id
        assert len({city for city, _ in prompt.needles}) == needles
        assert len({number for _, number in prompt.needles}) == needles
        assert sorted(NEEDLE.findall(text)) == sorted(prompt.needles)
        for (start, stop), (city, number) in zip(prompt.spans, prompt.needles, strict=True):
            held = tokenizer.decode(prompt.context[start:stop])
            assert f"The magic number of {city} is {number}." in held
        answer = sum(len(ids) for ids in prompt.together.answers[:queries])
        assert 1200 < len(prompt.prompt) + answer <= 1500
        question = tokenizer.decode(prompt.together.prompt)
        assert question.endswith((" is", " are"))
        assert all(city in question for city in prompt.together.cities)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_first_asked_needle_lies_at_its_depth(tokenizer, depth):
    short = [Document("d", " ".join(f"Line {n} is short." for n in range(900)))]
    for prompt in prompts(short, tokenizer, depths=(depth,), length=4000):
        assert prompt.found_at == pytest.approx(depth, abs=0.01)
        order = [city for city, _ in prompt.needles]
        text = tokenizer.decode(prompt.context)
        place = text.index(f"The magic number of {prompt.together.cities[0]}")
        before = NEEDLE.sub("", text[:place]).split("\n\n", 1)[1]
        whole = NEEDLE.sub("", text).split("\n\n")[1]
        assert len(before) / len(whole) == pytest.approx(depth, abs=0.015)
        assert len(order) == 4


def test_placing_all_that_are_asked(tokenizer):
    short = [Document("d", " ".join(f"Line {n} is short." for n in range(400)))]
    (prompt,) = prompts(
        short, tokenizer, needles=6, queries=3, depths=(0.5,), samples=1, placed="all_queries"
    )
    places = [[city for city, _ in prompt.needles].index(c) for c in prompt.together.cities]
    starts = [prompt.spans[place][0] for place in places]
    assert max(starts) - min(starts) < 200
    (anywhere,) = prompts(short, tokenizer, depths=(0.5,), samples=1, placed="random")
    assert anywhere.depth is None


def test_the_same_seed_gives_the_same_bytes(documents, tokenizer):
    first, again, other = (prompts(documents, tokenizer, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"length": 90}, "length: expected at least about"),
        ({"queries": 5}, "queries: expected 1 to needles"),
        ({"needles": 65}, "needles up to 64"),
        ({"placed": "last"}, "placed: expected one of first_query"),
    ],
)
def test_what_does_not_fit_is_refused(documents, tokenizer, change, says):
    with pytest.raises(UserError, match=says):
        prompts(documents, tokenizer, **change)


class Answers:
    """A stand-in for a model: it reads all tokens so far from the cache and says what comes next.

    `told` maps the needles of the text to the number that it gives for each city.
    """

    device, training = torch.device("cpu"), False

    def __init__(self, tokenizer, told):
        self.tokenizer, self.told, self.calls = tokenizer, told, 0
        self.config = LlamaConfig(num_hidden_layers=1)

    def __call__(self, input_ids, past_key_values, use_cache, logits_to_keep=0):
        self.calls += 1
        held = input_ids.double()[:, None, :, None]
        ids = past_key_values.update(held, held, 0)[0][0, 0, :, 0].long().tolist()
        count = input_ids.shape[1]
        logits = torch.zeros(1, count, len(self.tokenizer))
        for n in range(0 if logits_to_keep == 0 else count - 1, count):
            logits[0, n, self.following(ids[: len(ids) - count + n + 1])] = 30.0
        return SimpleNamespace(logits=logits)

    def following(self, ids):
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        question = text.rpartition("\n")[2]
        match = re.match(r"The magic numbers? of (.+?) (?:is|are)(.*)", question)
        if match is None:
            return 0
        cities = re.split(", | and ", match[1])
        numbers = self.told(NEEDLE.findall(text))
        wanted = " " + " and ".join(numbers[city] for city in cities) + "\n"
        whole = self.encoded(question[: match.start(2)] + wanted)
        return whole[min(len(self.encoded(question)), len(whole) - 1)]

    def encoded(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def scored(documents, tokenizer, told, **change):
    found = prompts(documents, tokenizer, **change)
    model = Answers(tokenizer, told)
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, limit=None)
    return list(retrieval.measure(retrieval.Settings(), loaded, found)), model


def mean(records, key):
    return np.mean([record["values"][key] for record in records])


def turned(needles):
    """Every city gets the number of the next needle."""
    cities, numbers = zip(*needles, strict=True)
    return dict(zip(cities, numbers[1:] + numbers[:1], strict=True))


def test_oracle_finds_everything(documents, tokenizer):
    records, _ = scored(documents, tokenizer, dict)
    assert all(mean(records, key) == 1 for key in ("found", "all_found", "chosen"))
    assert mean(records, "swapped") == mean(records, "missed") == 0
    assert mean(records, "nats") < 1e-6
    assert not any(record["flags"] for record in records)


def test_distractor_finds_nothing_and_swaps_everything(documents, tokenizer):
    records, _ = scored(documents, tokenizer, turned, queries=1)
    assert mean(records, "found") == mean(records, "chosen") == 0
    assert mean(records, "swapped") == mean(records, "missed") == 1


def test_invented_numbers_are_missed_not_swapped(documents, tokenizer):
    records, _ = scored(documents, tokenizer, lambda n: dict.fromkeys(dict(n), "0000000"))
    assert mean(records, "found") == mean(records, "swapped") == 0
    assert mean(records, "missed") == 1


def test_shuffled_needles_are_at_chance(documents, tokenizer):
    """Numbers dealt to the cities at random: one in four is right."""
    rng = np.random.default_rng(0)
    dealt = {}

    def told(needles):
        cities, numbers = zip(*needles, strict=True)
        key = tuple(cities)
        dealt.setdefault(key, rng.permutation(len(numbers)))
        return dict(zip(cities, (numbers[n] for n in dealt[key]), strict=True))

    records, _ = scored(documents, tokenizer, told, queries=1, length=700, samples=14)
    low, high = proportion_interval(len(records) * mean(records, "chosen"), len(records))
    assert low <= 0.25 <= high
    assert high < 0.5


def test_one_reading_of_the_context_serves_all_scorers(documents, tokenizer):
    _, model = scored(documents, tokenizer, dict, depths=(0.5,), samples=1)
    # context; question and draft and its end; for each of two cities the question and 4 numbers
    assert model.calls <= 1 + 25 + 2 * (1 + 4)


@pytest.mark.parametrize("draft", ["right", "wrong", "partly", "none"])
def test_a_draft_changes_no_token(place, draft):
    model = load_base(place / "one")
    ids = torch.randint(300, (20,)).tolist()

    def said(given):
        return ReadContext(model, ids[:10]).greedy(ids[10:], 8, [], draft=given)

    plain = said([])
    wrong = [(token + 1) % 300 for token in plain]
    drafts = {"right": plain, "wrong": wrong, "partly": plain[:3] + wrong[3:], "none": []}
    assert said(drafts[draft]) == plain
    assert len(plain) == 8


def test_scores_are_those_of_one_pass(place):
    model = load_base(place / "one")
    ids, answers = torch.randint(300, (20,)).tolist(), [[5, 6, 7], [8]]
    context = ReadContext(model, ids[:10])
    for _ in range(2):  # what was read before leaves nothing behind
        for answer, score in zip(answers, context.scores(ids[10:], answers), strict=True):
            logits = model(input_ids=torch.tensor([ids + answer])).logits[0].log_softmax(-1)
            wanted = sum(logits[19 + n, token].item() for n, token in enumerate(answer))
            assert score == pytest.approx(wanted, rel=1e-4)


def test_a_share_never_gets_an_empty_interval():
    low, high = proportion_interval(20, 20)
    assert low == pytest.approx(0.839, abs=0.001)
    assert high == 1
    nothing = bootstrap_interval(np.zeros((1, 20)), careful=1.0)
    assert verdict_of(nothing, better="higher", margin=0.02) == "undecided"


def test_two_hundred_draws_of_the_same_records_are_no_difference(documents, tokenizer):
    records, _ = scored(documents, tokenizer, turned)
    for key in ("found", "chosen", "nats", "swapped"):
        values = np.array([[record["values"][key] for record in records]])
        for seed in range(200):
            interval = bootstrap_interval(values - values, seed=seed, draws=20)
            assert verdict_of(interval, better="higher", margin=0.0) == "no difference"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cells": ("2x3",)}, "retrieval.cells"),
        ({"cells": ("two",)}, "retrieval.cells"),
        ({"samples": 0}, "retrieval.samples"),
        ({"placed": "end"}, "retrieval.placed"),
        ({"depths": (1.5,)}, "retrieval.depths"),
        ({"lengths": (0,)}, "retrieval.lengths"),
    ],
)
def test_settings_out_of_place(change, says):
    with pytest.raises(UserError, match=says):
        retrieval.Settings(**change)


def test_a_length_beyond_the_context_is_refused(documents, tokenizer):
    loaded = SimpleNamespace(model=None, tokenizer=tokenizer, limit=512)
    with pytest.raises(UserError, match="at most 512, the model's context"):
        retrieval.items(retrieval.Settings(), loaded, Text(documents, documents, "a text"))
