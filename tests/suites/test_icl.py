"""Many-shot classification by models that know, confuse, or guess, and its protocol."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from diffattn.cli import main
from diffattn.data import load_tokenizer, train_tokenizer
from diffattn.data.classification import labelled_texts, split_labelled
from diffattn.data.shot_order import order_shots
from diffattn.data.shot_prompts import ShotPrompts, shortest_prefixes
from diffattn.dex.base import load_base
from diffattn.errors import UserError
from diffattn.evaluation.bootstrap import bootstrap_interval, verdict_of
from diffattn.evaluation.continuations import ReadContext
from diffattn.evaluation.label_choice import LabelChoice
from diffattn.evaluation.order_spread import expected_range, order_spread, pair_agreement
from diffattn.suites import icl

TEXT = None  # icl reads its own data


@pytest.fixture(scope="module")
def tokenizer(with_bos):
    texts = [f"query: {text}\nintent: {label}\n==\n" for text, label in labelled_texts("banking77")]
    return with_bos(train_tokenizer(texts[:1500], 700))


class Answers:
    """A stand-in for a model that gives each question the label that `told` names."""

    device, training = torch.device("cpu"), False

    def __init__(self, tokenizer, labels, told):
        self.tokenizer, self.labels, self.told = tokenizer, labels, told
        self.config, self.sizes = LlamaConfig(num_hidden_layers=1), []

    def __call__(self, input_ids, past_key_values, use_cache, logits_to_keep=0):
        count = input_ids.shape[1]
        self.sizes.append(count)
        held = input_ids.double()[:, None, :, None]
        ids = past_key_values.update(held, held, 0)[0][0, 0, :, 0].long().tolist()
        logits = torch.zeros(1, count, len(self.tokenizer))
        for n in range(0 if logits_to_keep == 0 else count - 1, count):
            token = self.following(
                ids[max(0, len(ids) - count + n - 120) : len(ids) - count + n + 1]
            )
            if token is not None:
                logits[0, n, token] = 30.0
        return SimpleNamespace(logits=logits)

    def following(self, ids):
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        query, colon, begun = text.rpartition("query: ")[2].partition("\nintent:")
        if not colon or "\n" in begun:
            return None
        label = self.labels[self.told(query)]
        for size in range(len(label)):
            if self.tokenizer.decode(label[:size]) == begun:
                return label[size]
        return None


def run(tokenizer, told, limit=None, **change):
    options = {"shots": (8,), "tests": 40, "orders": 3, "classes": 5, "kinds": ("random",)}
    settings = icl.Settings(**{**options, **change})
    split = settings.split()
    labels = ShotPrompts(tokenizer, ("query", "intent"), split.labels).labels
    model = Answers(tokenizer, labels, told(split))
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, limit=limit)
    found = icl.items(settings, loaded, TEXT)
    return list(icl.measure(settings, loaded, found)), model, found, settings


def truth(split):
    return dict(split.tests).__getitem__


def other(split):
    known = dict(split.tests)
    return lambda q: split.labels[(split.labels.index(known[q]) + 1) % len(split.labels)]


def shuffled(split):
    rng = np.random.default_rng(0)
    drawn = {q: split.labels[rng.integers(len(split.labels))] for q, _ in split.tests}
    return drawn.__getitem__


@pytest.mark.parametrize(("told", "share"), [(truth, 1.0), (other, 0.0)])
def test_an_oracle_has_all_and_a_distractor_none(tokenizer, told, share):
    records, *_ = run(tokenizer, told)
    for record in records:
        assert record["values"]["right"] == record["values"]["right_whole"] == share
        assert record["values"]["agreement"] == 1.0
        assert record["flags"] == []


def test_shuffled_labels_are_at_chance(tokenizer):
    records, *_ = run(tokenizer, shuffled, tests=250, orders=2)
    right = np.mean([record["values"]["right"] for record in records])
    assert right == pytest.approx(0.2, abs=3 * (0.16 / len(records)) ** 0.5)


def test_a_thousand_shots_are_read_once_for_each_order(tokenizer):
    started = time.perf_counter()
    records, model, found, _ = run(
        tokenizer, truth, tests=250, shots=(1000,), orders=2, classes=None, whole=False
    )
    seconds = time.perf_counter() - started
    long = [size for size in model.sizes if size > 1000]
    assert long == [len(context) for context in found[0].contexts]
    questions = sum(len(item.question) for item in found)
    rest = sum(size for size in model.sizes if size <= 1000)
    assert rest < 2 * (questions + 12 * len(found))
    assert len(records) >= 245
    print(f"1,000 shots, {len(records)} items, 2 orders: {seconds:.1f} s, read {long} tokens once")


def test_the_prompt_keeps_the_protocol(tokenizer):
    _, _, found, settings = run(tokenizer, truth)
    split = settings.split()
    for item in found:
        for context in item.contexts:
            assert list(context).count(tokenizer.bos_token_id) == 1
            text = tokenizer.decode(context, skip_special_tokens=True)
            assert text.count("\n==\n") == 8
            assert text.endswith("\n==\n")
            assert text.startswith("query: ")
        assert tokenizer.decode(item.question).endswith("\nintent:")
    assert not {q for q, _ in split.tests} & {q for q, _ in split.shots}
    texts = [tokenizer.decode(c).removeprefix(tokenizer.bos_token) for c in found[0].contexts]
    assert len(set(texts)) == 3
    assert len({tuple(sorted(text.split("\n==\n"))) for text in texts}) == 1


def test_prefixes_are_the_shortest_that_tell_labels_apart(tokenizer):
    names = ["card lost", "card", "card arrival", "top up"]
    labels = ShotPrompts(tokenizer, ("query", "intent"), names).labels
    found = shortest_prefixes(labels)
    newline = tokenizer("\n==\n", add_special_tokens=False)["input_ids"][0]
    assert found["card"] == labels["card"]
    assert found["card"][-1] == newline
    assert len(found["top up"]) < len(labels["top up"])
    for name, ids in found.items():
        mine = [key for key, whole in labels.items() if whole[: len(ids)] == ids]
        assert mine == [name]
        if len(ids) > 1:
            assert sum(whole[: len(ids) - 1] == ids[:-1] for whole in labels.values()) > 1
    with pytest.raises(UserError, match="the same tokens"):
        ShotPrompts(_Same(tokenizer), ("query", "intent"), ["one", "two"])


class _Same:
    """Gives every label the same tokens."""

    def __init__(self, tokenizer):
        self.inner, self.bos_token_id = tokenizer, tokenizer.bos_token_id

    def __call__(self, text, **options):
        head = text.partition(":")[0]
        return self.inner(f"{head}:" + " x" * (not text.endswith(":")), **options)


def test_orders():
    shots = [(f"{label}{n}", label) for n in range(4) for label in "abc"]
    for order in range(3):
        lists = {k: order_shots(shots, 12, kind=k, order=order) for k in icl.ORDERS}
        assert all(sorted(found) == sorted(shots) for found in lists.values())
        blocked = [label for _, label in lists["blocked"]]
        assert [blocked[n] for n in (0, 4, 8)] * 4 != blocked
        assert all(len(set(blocked[n : n + 4])) == 1 for n in (0, 4, 8))
        alternating = [label for _, label in lists["alternating"]]
        assert alternating == alternating[:3] * 4
        assert len(set(alternating[:3])) == 3
        few = order_shots(shots, 6, kind="random", order=order)
        assert set(few) == set(shots[:6])
        longer = [s for s in order_shots(shots, 12, kind="random", order=order) if s in few]
        assert longer == few
    assert order_shots(shots, 12, kind="random", order=0) != order_shots(
        shots, 12, kind="random", order=1
    )


def test_what_does_not_fit_is_refused_or_flagged(tokenizer):
    with pytest.raises(UserError, match=r"icl.shots: 8 are .* tokens .* expected at most 200"):
        run(tokenizer, truth, limit=200)
    records, _, found, _ = run(tokenizer, truth, limit=200, fewer=True)
    used = found[0].used
    assert 1 <= used < 8
    assert all(record["flags"] == [f"{used} of 8 shots fit"] for record in records)
    assert max(len(c) for c in found[0].contexts) + max(len(i.question) for i in found) <= 200
    with pytest.raises(UserError, match=r"icl\.shots: expected at most"):
        run(tokenizer, truth, shots=(99999,))


def test_spread_against_its_floors():
    assert expected_range(2) == pytest.approx(2 / np.pi**0.5, abs=1e-4)
    assert expected_range(10) == pytest.approx(3.0775, abs=1e-3)
    rng = np.random.default_rng(0)
    same = rng.random((10, 250)) < 0.8
    spread = order_spread(same)
    assert spread.floor == pytest.approx(3.0775 * (0.8 * 0.2 / 250) ** 0.5, rel=0.05)
    assert spread.floor_same == pytest.approx(spread.floor, rel=0.15)
    fixed = order_spread(np.tile(same[:1], (10, 1)))
    assert (fixed.margin, fixed.deviation, fixed.floor_same) == (0, 0, 0)
    assert fixed.floor > 0
    two = order_spread(np.array([[1, 1, 0, 0], [1, 1, 1, 1]]))
    assert (two.mean, two.worst, two.margin) == (0.75, 0.5, 0.5)
    assert pair_agreement("aab") == pytest.approx(1 / 3)


def test_the_likeliest_label_is_that_of_all_scores(place):
    model = load_base(place / "other", dtype=torch.float32)
    tokenizer = load_tokenizer(place / "other")
    names = ["peace", "people", "peace work", "union", "strong state"]
    prompts = ShotPrompts(tokenizer, ("text", "label"), names)
    read = ReadContext(model, prompts.context([("the union", "union"), ("we", "people")]))
    for text in ("for peace", "is strong", "we will work"):
        ids = prompts.question(text)
        scores = read.scores(ids, [prompts.labels[name] for name in names])
        with LabelChoice(read, ids) as choice:
            mine = [choice.score(prompts.labels[name]) for name in names]
            assert choice.likeliest(prompts.labels) == names[int(np.argmax(scores))]
        assert mine == pytest.approx(scores, abs=2e-3)


def test_files_of_text_and_label(tmp_path):
    rows = [("a b", "x_y"), ("c", "z"), ("a  b", "x_y")]
    lines = "\n".join(json.dumps({"text": t, "label": n}) for t, n in rows)
    (tmp_path / "d.jsonl").write_text(lines)
    (tmp_path / "d.csv").write_text("text,label\n" + "\n".join(f"{t},{n}" for t, n in rows))
    task = [{"input": f"Utterance: {t}", "target_scores": {n: 1, "no": 0}} for t, n in rows]
    (tmp_path / "d.json").write_text(json.dumps({"examples": task}))
    for kind in ("jsonl", "csv", "json"):
        found = labelled_texts(str(tmp_path / f"d.{kind}"))
        assert found == (("a b", "x y"), ("c", "z"))
    assert len({label for _, label in labelled_texts("clinc150")}) == 150
    with pytest.raises(UserError, match="data: expected banking77, clinc150, or a CSV"):
        labelled_texts(str(tmp_path / "none.csv"))
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="data: expected text and label in record 1"):
        labelled_texts(str(tmp_path / "bad.csv"))
    with pytest.raises(UserError, match="classes: expected 2 to 2"):
        split_labelled(rows, tests=1, classes=9)


def test_the_command_and_the_same_model_twice(place, tmp_path, capsys):
    fast = ["icl.shots=4", "icl.tests=12", "icl.orders=2", "icl.classes=3", "icl.kinds=random"]
    sets = [part for one in fast for part in ("--set", one)]
    text = ["--data", str(place / "text.jsonl"), *sets]
    models = [str(place / "one"), str(place / "one")]
    out = tmp_path / "out"
    assert main(["eval", *models, "--suite", "icl", "--out", str(out), *text]) == 0
    for path in (out / "cards").iterdir():
        found = json.loads(path.read_text())
        assert (found["effect"], found["verdict"]) == (0.0, "no difference")
    assert "best - worst" in (out / "report.html").read_text()
    records = [
        json.loads(line) for line in (out / "records/icl/one-0.jsonl").read_text().splitlines()[1:]
    ]
    for name in ("right", "agreement", "nats"):
        values = np.array([[record["values"][name] for record in records]])
        for draw in range(200):
            interval = bootstrap_interval(values - values, seed=draw, draws=50)
            assert verdict_of(interval, better="higher", margin=0.02) == "no difference"
    short = ["eval", str(place / "short"), "--suite", "icl", "--out", str(tmp_path / "s"), *text]
    assert main(short) == 2
    assert "icl.shots: 4 are" in capsys.readouterr().err
