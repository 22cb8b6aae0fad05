"""Checks that the report and the terminal table show any comparison, complete or not."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
import statistics
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from diffattn.compare import plots, report
from diffattn.compare.answer import answer
from diffattn.compare.report import render_report, write_report
from diffattn.compare.rows import labels, measure_table
from diffattn.compare.table import terminal_table
from diffattn.errors import UserError
from diffattn.report.numbers import count_text
from diffattn.report.palette import DARK_COLORS
from diffattn.report.plot_style import WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

Results = dict[str, Any]

ARMS = {
    "transformer": ("Transformer", "softmax", "8 heads of 16", 4.10),
    "transformer-wide": ("Transformer, half the heads", "softmax", "4 heads of 32", 4.12),
    "diff-v1": ("Diff V1", "v1", "4 differential heads", 4.07),
    "diff-v2": ("Diff V2", "v2", "8 differential heads", 4.04),
}
DEPTHS = (0.0, 0.5, 1.0)
CELLS = ((1, 1), (4, 2))
LENGTHS = (128, 512)
MEASURED_ALWAYS = ("heldout_loss", "tokens_per_second")
FIGURES: Sequence[Callable[[Results], str]] = (
    plots.loss_over_tokens,
    plots.loss_over_time,
    plots.recall_heatmaps,
    plots.recall_by_length,
    plots.attention_bars,
    plots.attention_by_depth,
    plots.lam_by_layer,
    plots.differences,
)


def build_results(arms: int = 4, seeds: int = 3) -> Results:
    """Builds the results of a comparison that never ran."""
    chance = random.Random(7)
    listed = [_arm(chance, index, seeds) for index in range(arms)]
    measures = _measures()
    values = {arm["name"]: _values(arm, measures) for arm in listed}
    comparisons = [
        _comparison(values, arm["name"], measure) for measure in measures for arm in listed[1:]
    ]
    return {
        "schema": 1,
        "title": "Four kinds of attention on one text",
        "command": "diffattn compare --preset quick --seeds 0,1,2 --out runs/quick",
        "version": "0.1.0",
        "created": "2025-01-31T12:00:00+00:00",
        "machine": {
            "device": "cpu",
            "cores": 4,
            "torch": "2.9.0",
            "transformers": "4.57.0",
            "python": "3.11.7",
            "threads_per_run": 2,
            "jobs": 2,
        },
        "preset": "quick",
        "config": {"model": {"layers": 6, "width": 128}, "steps": 600, "betas": [0.9, 0.95]},
        "data": {
            "source": "Python documentation",
            "documents_train": 900,
            "documents_heldout": 100,
            "tokens_train": 2_400_000,
            "tokens_heldout": 260_000,
            "vocab_size": 4096,
            "bytes_per_token": 3.41,
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        },
        "seeds": list(range(seeds)),
        "arms": listed,
        "measures": measures,
        "values": values,
        "comparisons": comparisons,
        "family": {
            "comparisons": len(comparisons),
            "level": 0.95,
            "method": "Paired differences over seeds, Bonferroni-corrected t intervals.",
        },
        "notes": ["Speeds were measured while two runs shared the machine."],
        "peak_memory_bytes": 1_450_000_000,
        "wall_seconds": 4321.0,
    }


def _arm(chance: random.Random, index: int, seeds: int) -> dict[str, Any]:
    name = list(ARMS)[index]
    label, attention, heads, loss = ARMS[name]
    return {
        "name": name,
        "label": label,
        "attention": attention,
        "parameters": 1_720_000 + 1000 * index,
        "parameters_non_embedding": 1_190_000 + 1000 * index,
        "flops_per_token": 8.1e6 + 4e5 * index,
        "tokens": 1_228_800,
        "heads": heads,
        "own_start": False,
        "runs": [_run(chance, index, loss, seed) for seed in range(seeds)],
    }


def _run(chance: random.Random, index: int, loss: float, seed: int) -> dict[str, Any]:
    final = loss + chance.gauss(0.0, 0.01)
    speed = 9000.0 - 1400.0 * index + chance.gauss(0.0, 100.0)
    return {
        "seed": seed,
        "heldout_loss": final,
        "train_seconds": 1_228_800 / speed,
        "tokens_per_second": speed,
        "peak_memory_bytes": 900_000_000 + 50_000_000 * index,
        "warnings": ["the gradient was clipped in every step"] if index == 1 and seed == 0 else [],
        "curve": _curve(chance, final, speed),
        "recall": _recall(chance, index),
        "attention": _attention(chance, index),
        "lam": [0.2 + 0.6 * (1 - math.exp(-0.3 * k)) + chance.gauss(0, 0.02) for k in range(6)]
        if index > 1
        else None,
    }


def _curve(chance: random.Random, final: float, speed: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "tokens": 2048 * step,
            "seconds": 2048 * step / speed,
            "train_loss": final + 4.3 * math.exp(-step / 120) + chance.gauss(0.0, 0.05),
            "heldout_loss": final + 4.3 * math.exp(-step / 120) if step % 50 == 0 else None,
            "grad_norm": 1.0,
        }
        for step in range(0, 601, 25)
    ]


def _recall(chance: random.Random, index: int) -> list[dict[str, Any]]:
    return [
        {
            "length": length,
            "needles": needles,
            "queries": queries,
            "depth": depth,
            "accuracy": max(0.0, 1.0 - 0.09 * needles - length / 1300 + 0.03 * index)
            * chance.uniform(0.6, 1.0),
            "swap": 0.05,
            "items": 64,
        }
        for length, (needles, queries), depth in itertools.product(LENGTHS, CELLS, DEPTHS)
    ]


def _attention(chance: random.Random, index: int) -> dict[str, Any]:
    answered, noise = 0.05 + 0.03 * index, 0.62 - 0.11 * index
    return {
        "answer": answered + chance.gauss(0.0, 0.004),
        "noise": noise + chance.gauss(0.0, 0.02),
        "first": 0.2 - 0.03 * index,
        "by_depth": [
            {
                "depth": depth,
                "answer": answered * (0.8 + 0.5 * depth) + chance.gauss(0.0, 0.004),
                "noise": noise + chance.gauss(0.0, 0.02),
            }
            for depth in DEPTHS
        ],
    }


def _measures() -> list[dict[str, Any]]:
    def measure(name: str, label: str, unit: str, better: str) -> dict[str, Any]:
        return {"name": name, "label": label, "unit": unit, "better": better}

    cells = [
        measure(f"recall[N={n},R={r}]", f"recall, {n} needles, {r} asked", "share", "higher")
        for n, r in CELLS
    ]
    depths = [
        measure(f"recall[depth={d}]", f"recall at depth {100 * d:.0f} %", "share", "higher")
        for d in DEPTHS
    ]
    return [
        measure("heldout_loss", "held-out loss", "nats/token", "lower"),
        measure("recall", "recall", "share", "higher"),
        *cells,
        *depths,
        measure("attention_answer", "attention on the answer", "share", "higher"),
        measure("attention_noise", "attention on noise", "share", "lower"),
        measure("tokens_per_second", "training speed", "tokens/s", "higher"),
    ]


def _values(arm: dict[str, Any], measures: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for measure in measures:
        per_seed = [_value(run, measure["name"]) for run in arm["runs"]]
        sd = statistics.stdev(per_seed) if len(per_seed) > 1 else None
        found[measure["name"]] = {"mean": statistics.fmean(per_seed), "sd": sd}
        found[measure["name"]]["per_seed"] = per_seed
    return found


def _value(run: dict[str, Any], name: str) -> float:
    if name.startswith("attention_"):
        return run["attention"][name.removeprefix("attention_")]
    if not name.startswith("recall"):
        return run[name]
    return statistics.fmean(item["accuracy"] for item in run["recall"] if name in _names(item))


def _names(item: dict[str, Any]) -> Sequence[str]:
    cell = f"recall[N={item['needles']},R={item['queries']}]"
    return "recall", cell, f"recall[depth={item['depth']}]"


def _comparison(values: dict[str, Any], arm: str, measure: dict[str, Any]) -> dict[str, Any]:
    name = measure["name"]
    ours, theirs = values[arm][name], values["transformer"][name]
    difference = ours["mean"] - theirs["mean"]
    half = None if ours["sd"] is None else 4.0 * max(ours["sd"], theirs["sd"])
    verdict = "no difference"
    if half is not None and abs(difference) > half:
        verdict = "better" if (difference > 0) == (measure["better"] == "higher") else "worse"
    return {
        "arm": arm,
        "against": "transformer",
        "measure": name,
        "difference": difference,
        "interval": None if half is None else [difference - half, difference + half],
        "verdict": verdict,
        "reason": "one seed gives no interval" if half is None else None,
        "smallest_detectable": half,
    }


def nothing_measured() -> Results:
    """Builds results of runs that measured no more than their loss and speed."""
    results = build_results()
    for run in (run for arm in results["arms"] for run in arm["runs"]):
        run.update(recall=[], attention=None, curve=[], lam=None)
    for part, key in (("measures", "name"), ("comparisons", "measure")):
        results[part] = [item for item in results[part] if item[key] in MEASURED_ALWAYS]
    for found in results["values"].values():
        for name in set(found) - set(MEASURED_ALWAYS):
            del found[name]
    return results


def broken() -> Results:
    """Builds results in which one run diverged and one value is missing."""
    results = build_results(arms=3, seeds=2)
    run = results["arms"][2]["runs"][0]
    run["heldout_loss"] = math.nan
    run["curve"][-1]["heldout_loss"] = math.nan
    run["recall"][0]["accuracy"] = None
    run["attention"]["noise"] = math.nan
    results["values"]["diff-v1"]["heldout_loss"]["mean"] = math.nan
    results["values"]["diff-v1"]["heldout_loss"]["sd"] = math.nan
    del results["values"]["transformer-wide"]["recall"]["mean"]
    for item in results["comparisons"]:
        if item["arm"] == "diff-v1" and item["measure"] == "heldout_loss":
            item.update(difference=math.nan, interval=None, smallest_detectable=None)
            item.update(verdict="no difference", reason="a value is missing or infinite")
    return results


def least() -> Results:
    """Builds results with one seed, one cell, one length and one depth."""
    results = build_results(arms=2, seeds=1)
    for arm in results["arms"]:
        for run in arm["runs"]:
            run["recall"] = run["recall"][:1]
            run["curve"] = run["curve"][:1]
    return results


def bare() -> Results:
    """Builds results that hold nothing but one arm without runs."""
    return {"arms": [{"name": "transformer", "label": "Transformer"}]}


DEGENERATE: dict[str, Callable[[], Results]] = {
    "least": least,
    "one softmax arm": lambda: build_results(arms=1, seeds=2),
    "nothing measured": nothing_measured,
    "broken values": broken,
    "bare": bare,
}


@pytest.fixture(scope="module")
def results() -> Results:
    return build_results()


@pytest.fixture(scope="module")
def page(results: Results) -> str:
    return render_report(results)


class _Structure(HTMLParser):
    """Collects the tags, ids and visible text of a page, and checks that tags close."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids.extend(value or "" for key, value in attrs if key == "id")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def structure(page: str) -> _Structure:
    """Parses a page."""
    parsed = _Structure()
    parsed.feed(page)
    parsed.close()
    return parsed


def text_of(page: str) -> str:
    """Reads the visible text of a page, with single spaces."""
    return " ".join(" ".join(structure(page).text).split())


def svg_texts(svg: str) -> Iterator[str]:
    """Reads the texts of a figure."""
    for element in ElementTree.fromstring(svg).iter():
        if element.tag.endswith("}text"):
            yield "".join(element.itertext())


def test_page_needs_nothing_else(page: str) -> None:
    assert not re.findall(r"https?://", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert not {"script", "link", "img", "iframe", "object"} & set(structure(page).tags)
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)


def test_page_is_well_formed(page: str) -> None:
    parsed = structure(page)
    assert page.startswith("<!doctype html>")
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))


def test_every_reference_inside_a_figure_has_a_target(page: str) -> None:
    targets = set(re.findall(r'(?:href="|url\()#([^")]+)', page))
    assert targets
    assert targets <= set(structure(page).ids)


def test_page_names_every_arm_and_verdict(page: str, results: Results) -> None:
    text = text_of(page)
    for label in labels(results).values():
        assert label in text
    for verdict in ("better", "worse", "no difference"):
        assert f'class="pill {verdict.replace(" ", "-")}">{verdict}<' in page


def test_page_says_what_attends_in_every_arm(page: str) -> None:
    text = text_of(page)
    assert "softmax: 8 heads of 16" in text
    assert "V1: 4 differential heads" in text
    assert "V2: 8 differential heads" in text


def test_page_begins_with_the_answer_then_table_then_figures(page: str) -> None:
    places = [page.index(f'id="{name}"') for name in ("answer", "repeat", "arms", "differences")]
    assert places == sorted(places)


def test_answer_counts_the_verdicts(results: Results) -> None:
    summary = answer(results)
    assert summary.lead == "Against Transformer, with 3 seeds:"
    assert [arm.label for arm in summary.arms] == list(labels(results).values())[1:]
    for arm in summary.arms:
        verdicts = [c["verdict"] for c in results["comparisons"] if c["arm"] == arm.arm]
        assert f"worse on {verdicts.count('worse')}" in arm.text
        assert f"{verdicts.count('no difference')} this run shows no difference" in arm.text
        assert sum(arm.counts.values()) == len(verdicts)
    assert any("contains zero" in sentence for sentence in summary.explanations)
    assert any("jointly at 95\N{NO-BREAK SPACE}%" in text for text in summary.explanations)


def test_answer_reads_like_a_sentence() -> None:
    results = build_results(arms=2)
    for item, verdict in zip(
        results["comparisons"], ["better", "worse", *["no difference"] * 8], strict=True
    ):
        item["verdict"] = verdict
    (arm,) = answer(results).arms
    assert f"{arm.label}{arm.text}" == (
        "Transformer, half the heads is better on 1 of 10 measures (held-out loss), worse on 1 "
        "(recall); on the other 8 this run shows no difference."
    )


def test_answer_separates_no_difference_from_no_value() -> None:
    results = build_results(arms=2)
    for item in results["comparisons"]:
        item["verdict"] = "no difference"
    assert answer(results).arms[0].text == (": on all 10 measures this run shows no difference.")
    results["comparisons"][0].update(difference=None, interval=None, reason="a value is missing")
    assert answer(results).arms[0].text == (
        ": on 9 of 10 measures this run shows no difference; "
        "on 1 of 10 measures this run shows no difference (a value is missing)."
    )


def test_one_seed_is_no_difference_everywhere_with_the_reason() -> None:
    results = build_results(arms=2, seeds=1)
    summary = answer(results)
    assert summary.arms[0].text == (
        ": on all 10 measures this run shows no difference (one seed gives no interval)."
    )
    assert summary.explanations[0].startswith("One seed gives no interval, so this run cannot")
    assert "--seeds 3 --resume" in summary.explanations[0]
    rows = measure_table(results)
    assert {(row.verdict, row.reason) for row in rows} == {
        ("no difference", "one seed gives no interval")
    }
    page, table = render_report(results), terminal_table(results)
    pills = re.findall(r'<span class="pill [^"]*">([^<]*)</span><small>([^<]*)', page)
    assert pills == [("no difference", "one seed gives no interval")] * 10
    for text in (text_of(page), table):
        assert "cannot tell (no" not in text
        assert "no interval" not in text.replace("gives no interval", "")


@pytest.mark.parametrize("name", ["least", "broken values", "nothing measured"])
def test_verdicts_of_the_page_are_those_of_the_results(name: str) -> None:
    results = DEGENERATE[name]()
    stored = {(c["arm"], c["measure"]): c["verdict"] for c in results["comparisons"]}
    rows = measure_table(results)
    assert {(row.arm, row.measure.name): row.verdict for row in rows} == stored
    pills = re.findall(r'<span class="pill [^"]*">([^<]*)</span>', render_report(results))
    assert sorted(pills) == sorted(stored.values())


def test_intervals_of_shares_end_at_what_can_be() -> None:
    results = build_results(arms=2)
    told = " ".join(answer(results).explanations)
    assert "cut at 100 points" not in told
    assert "largest difference" not in told
    for item in results["comparisons"]:
        item.update(difference=0.1, interval=[-1.3, 1.5], smallest_detectable=1.4)
    rows = {row.measure.name: row for row in measure_table(results)}
    recall, loss = rows["recall"], rows["heldout_loss"]
    assert recall.interval == "\N{MINUS SIGN}100.0 to +100.0"
    assert (recall.raw_interval, recall.cut, recall.smallest) == ((-1.0, 1.0), True, "none")
    assert loss.interval == "\N{MINUS SIGN}1.3000 to +1.5000"
    assert (loss.cut, loss.smallest) == (False, "1.4000")
    told = " ".join(answer(results).explanations)
    assert "cut at 100 points" in told
    assert "could not have detected even the largest difference there can be in recall; " in told
    assert "140.0" not in told


def test_page_escapes_what_it_is_given() -> None:
    results = nothing_measured()
    evil = "<script>alert('$x$ & \"y\"')</script>"
    results["data"]["source"] = evil
    results["title"] = results["arms"][1]["label"] = results["notes"][0] = evil
    results["measures"][0]["label"] = results["config"]["steps"] = results["command"] = evil
    page = render_report(results)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert structure(page).open == []


def test_same_results_give_the_same_bytes_in_one_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    write_report(nothing_measured(), target)
    assert target.read_bytes() == render_report(nothing_measured()).encode()
    assert list(tmp_path.iterdir()) == [target]


def test_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "render_report", lambda results: "page")
    target = tmp_path / "report.html"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_report({}, target)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_results_render(name: str) -> None:
    results = DEGENERATE[name]()
    page = render_report(results)
    text = text_of(page)
    assert structure(page).open == []
    for label in labels(results).values():
        assert label in text
    assert not re.search(r"\b(nan|None|inf)\b", text)
    assert "n/a" in text or name == "one softmax arm"


@pytest.mark.parametrize("name", DEGENERATE)
def test_terminal_table_fits(name: str) -> None:
    results = DEGENERATE[name]()
    text = terminal_table(results)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert not re.search(r"\b(nan|None|inf)\b", text)
    for label in labels(results).values():
        assert label in text


def test_terminal_table_fits_long_labels() -> None:
    results = build_results(arms=2)
    for item in (*results["arms"], *results["measures"]):
        item["label"] += " with a much longer name" * 4 + "-" * 120
    assert max(len(line) for line in terminal_table(results).splitlines()) <= 100


def test_terminal_table_shows_the_main_numbers(results: Results) -> None:
    text = terminal_table(results)
    assert max(len(line) for line in text.splitlines()) <= 100
    statistic = results["values"]["diff-v2"]["heldout_loss"]
    assert f"{statistic['mean']:.4f} ± {statistic['sd']:.4f}" in text
    assert "joint 95 % interval" in text
    assert all(verdict in text for verdict in ("better", "worse", "no difference"))


def test_terminal_table_prints_no_control_characters(results: Results) -> None:
    results = copy.deepcopy(results)
    results["title"] = "\x1b[31mred\x1b[0m " + "long " * 40
    text = terminal_table(results)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_missing_values_are_named() -> None:
    results = broken()
    rows = {(row.arm, row.measure.name): row for row in measure_table(results)}
    row = rows["diff-v1", "heldout_loss"]
    assert (row.value, row.difference, row.interval) == ("n/a",) * 3
    assert (row.verdict, row.reason) == ("no difference", "a value is missing or infinite")
    assert rows["transformer-wide", "recall"].value == "n/a"
    assert "n/a" in terminal_table(results)
    assert "n/a" in list(svg_texts(plots.recall_heatmaps(results)))


def test_measure_table_rounds_and_names_units(results: Results) -> None:
    results = copy.deepcopy(results)
    item = next(c for c in results["comparisons"] if c["measure"] == "attention_answer")
    item.update(difference=-0.00012, interval=[-0.25, 0.0301], smallest_detectable=0.2)
    row = next(r for r in measure_table(results) if r.measure.name == "attention_answer")
    assert row.difference == "\N{MINUS SIGN}0.01"
    assert row.interval == "\N{MINUS SIGN}25.0 to +3.0"
    assert row.smallest == "20.0"
    assert row.measure.scale.difference_unit == "points"
    assert row.measure.scale.difference(0.0) == "0.0"
    assert row.measure.scale.interval((0.0, 0.0)) == "0.0 to 0.0"


@pytest.mark.parametrize(
    ("count", "text"),
    [(1_234_567, "1.23 M"), (999_999, "1.00 M"), (12_345, "12.3 k"), (12, "12"), (None, "n/a")],
)
def test_counts_have_three_digits(count: object, text: str) -> None:
    assert count_text(count).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize("draw", FIGURES, ids=lambda draw: draw.__name__)
def test_page_holds_every_figure_with_a_description(
    draw: Callable[[Results], str], page: str, results: Results
) -> None:
    svg = draw(results)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert svg in page


@pytest.mark.parametrize("draw", FIGURES, ids=lambda draw: draw.__name__)
def test_figures_say_what_is_missing(draw: Callable[[Results], str]) -> None:
    svg = draw(bare())
    texts = list(svg_texts(svg))
    assert WORDS in svg
    assert len(texts) == 1
    assert re.match("This run|No arm", texts[0])


def test_figures_use_only_colours_that_have_a_dark_version(page: str) -> None:
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", page.partition("<body>")[2]))
    assert used <= set(DARK_COLORS)


def test_loss_falls_back_to_the_training_loss(results: Results) -> None:
    results = copy.deepcopy(results)
    for arm in results["arms"]:
        for run in arm["runs"]:
            for point in run["curve"]:
                point["heldout_loss"] = None
    assert "training loss (nats per token)" in list(svg_texts(plots.loss_over_tokens(results)))


def test_lam_names_the_arms_that_have_none(results: Results) -> None:
    texts = list(svg_texts(plots.lam_by_layer(results)))
    assert "layer (no λ: Transformer; Transformer, half the heads)" in texts
    layers = [text for text in texts if text.isdecimal()]
    assert layers == ["0", "1", "2", "3", "4", "5"], "layers count from 0, as everywhere"


@pytest.mark.parametrize(("points", "panels"), [(4, 1), (7, 1), (8, 2), (13, 2)])
def test_few_points_are_not_enlarged(results: Results, points: int, panels: int) -> None:
    results = copy.deepcopy(results)
    for arm in results["arms"]:
        for run in arm["runs"]:
            measured = [point for point in run["curve"] if point["heldout_loss"] is not None]
            run["curve"] = [point for point in run["curve"] if point not in measured[points:]]
    texts = list(svg_texts(plots.loss_over_tokens(results)))
    assert ("the second half, enlarged" in texts) == (panels == 2)


def test_page_says_how_many_documents_were_read(results: Results) -> None:
    results = copy.deepcopy(results)
    assert ("documents, training", "900") in report._data(results)
    results["data"].update(documents_train_given=2100, documents_heldout_given=233)
    text = text_of(render_report(results))
    assert "documents, training 900 of 2,100" in text
    assert "documents, held out 100 of 233" in text


def test_figures_name_what_to_install(monkeypatch: pytest.MonkeyPatch, results: Results) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=re.escape("pip install 'diffattn[plot]'")):
        plots.differences(results)
