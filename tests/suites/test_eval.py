"""`diffattn eval` as a user runs it: cards, page, resuming, refusals."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

from diffattn.cli import main
from diffattn.suites.cards import make_card
from diffattn.suites.subject import identity
from diffattn.suites.suite import settings_of, suite_named

PROMPTED = ("loss", "retrieval", "attention")
FAST = ["--set", "loss.characters=512", "--set", "loss.windows=1", "--set", "loss.chunk=100"]


def run(place, out, *models, extra=()):
    paths = [str(place / model) for model in models]
    data = [] if "--data" in extra else ["--data", str(place / "text.jsonl")]
    return main(["eval", *paths, "--suite", "loss", "--out", str(out), *data, *FAST, *extra])


def few(samples):
    """Settings of few short prompts for the suites that have prompts."""
    sizes = ("cells=2x1", "depths=0.5", f"samples={samples}", "lengths=600")
    texts = [f"{suite}.{size}" for suite in ("retrieval", "attention") for size in sizes]
    return [word for text in texts for word in ("--set", text)]


def card(out, name="loss"):
    return json.loads((out / "cards" / f"{name}.json").read_text())


def test_two_models(place, tmp_path, capsys):
    assert run(place, tmp_path / "out", "one", "other") == 0
    found = card(tmp_path / "out")
    assert {"claim", "effect", "interval", "verdict", "paper", "configuration"} <= set(found)
    assert found["items"] == found["clusters"] == 6
    assert found["verdict"] == "not supported"  # logits 200 times as large cost loss
    assert found["interval"][0] <= found["effect"] <= found["interval"][1]
    assert "not supported" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    for text in ("Loss by position", "AR-Hit", "other", "First and last ids"):
        assert text in page
    assert {"loss", "loss-late", "loss-ar-hit"} == {
        path.stem for path in (tmp_path / "out" / "cards").iterdir()
    }


def test_the_same_model_twice_is_no_difference(place, tmp_path):
    assert run(place, tmp_path / "out", "one", "one") == 0
    for name in ("loss", "loss-late", "loss-ar-hit"):
        found = card(tmp_path / "out", name)
        assert (found["effect"], found["interval"]) == (0.0, [0.0, 0.0])
        assert found["verdict"] == "no difference"
        assert found["comparisons"][0]["model"] == "one#2"


def test_two_hundred_draws_of_the_same_model(place, tmp_path):
    """Records of one model, measured twice: no claim of any suite finds a difference."""
    extra = [*few(samples=3), "--suite", ",".join(PROMPTED)]
    assert run(place, tmp_path / "out", "one", "one", extra=extra) == 0
    for name in PROMPTED:
        files = [tmp_path / "out" / "records" / name / f"{m}-0.jsonl" for m in ("one", "one#2")]
        measured = {}
        for file in files:
            records = [json.loads(line) for line in file.read_text().splitlines()[1:]]
            measured[file.stem] = [{record["id"]: record for record in records}]
        suite = suite_named(name)
        for claim in suite.claims(settings_of(name, {})):
            for seed in range(200 if claim.measure.name in records[0]["values"] else 0):
                found = make_card(
                    claim,
                    measured,
                    configuration={},
                    weights={name: ["the same"] for name in measured},
                    same_tokens=True,
                    seed=seed,
                )
                assert found["verdict"] == "no difference"


def test_one_model_alone_decides_nothing(place, tmp_path):
    assert run(place, tmp_path / "out", "one") == 0
    found = card(tmp_path / "out")
    assert found["verdict"] == "undecided"
    assert "nothing to compare" in found["reason"]
    assert found["effect"] > 0


def test_arms_of_a_comparison_pair_their_seeds(place, tmp_path):
    assert run(place, tmp_path / "out", "run/runs/first", "run/runs/second") == 0
    found = card(tmp_path / "out")
    assert found["seeds"] == 2
    assert [len(model["by_seed"]) for model in found["models"]] == [2, 2]
    assert len(list((tmp_path / "out" / "records" / "loss").iterdir())) == 4


def test_arms_by_their_names_and_with_common_seeds_alone(place, tmp_path, capsys):
    run_folder = tmp_path / "run"
    shutil.copytree(place / "run", run_folder)
    (run_folder / "runs" / "second" / "seed0" / "result.json").unlink()
    words = [f"{run_folder}:first", f"{run_folder}:second", "--suite", "loss", *FAST]
    words += ["--data", str(place / "text.jsonl"), "--out", str(tmp_path / "out")]
    assert main(["eval", *words]) == 0
    assert "first: seeds (1,) alone" in capsys.readouterr().err
    names = {path.name for path in (tmp_path / "out" / "records" / "loss").iterdir()}
    assert names == {"first-1.jsonl", "second-1.jsonl"}
    header = (tmp_path / "out" / "records" / "loss" / "first-1.jsonl").read_text().split("\n")[0]
    model = run_folder / "runs" / "first" / "seed1" / "model"
    assert json.loads(header)["weights"] == identity(model)


def test_resuming_measures_what_is_missing(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(place, out, "one", "other") == 0
    whole, path = card(out), out / "records" / "loss" / "other-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # torn in the middle of a record
    kept = (out / "records" / "loss" / "one-0.jsonl").read_bytes()
    assert run(place, out, "one", "other", extra=["--resume"]) == 0
    said = capsys.readouterr().err
    assert "one, loss: there already" in said
    assert "other, loss: 4 items" in said
    assert card(out) == whole
    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert (out / "records" / "loss" / "one-0.jsonl").read_bytes() == kept


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_command_goes_on(place, tmp_path, number):
    out = tmp_path / "out"
    words = ["eval", str(place / "one"), "--suite", "loss", "--out", str(out), *FAST]
    words += ["--data", str(place / "text.jsonl"), "--set", "loss.chunk=1"]
    process = subprocess.Popen([sys.executable, "-m", "diffattn", *words], stderr=subprocess.PIPE)
    records = out / "records" / "loss" / "one-0.jsonl"
    while not (records.exists() and records.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    told = process.communicate()[1].decode()
    if number == signal.SIGTERM:
        assert process.returncode == 130
        assert "--resume" in told
    assert not (out / "cards").exists()
    assert main([*words, "--resume"]) == 0
    assert card(out)["items"] == 6


REFUSED = {
    "no model": (["text.jsonl"], [], "MODEL: expected a folder"),
    "nothing there": (["none"], [], "MODEL: expected a folder"),
    "unfinished arm": (["run/runs/begun"], [], "has no finished run"),
    "field": (["one"], ["--set", "loss.word=3"], "set: expected one of loss.characters"),
    "value": (["one"], ["--set", "loss.windows=few"], "loss.windows: expected a whole number"),
    "no field": (["one"], ["--set", "loss=3"], "set: expected SUITE.FIELD=VALUE, got 'loss=3'"),
    "other suite": (["one"], ["--set", "icl.shots=3"], "set: icl is not among the suites"),
    "small": (["one"], ["--set", "loss.characters=100"], "loss.characters: expected at least"),
    "no such arm": (["run:third"], [], "MODEL: expected a folder"),
    "no memory": (["one"], ["--memory", "30KB"], "memory: expected at least"),
    "dtype": (["one"], ["--dtype", "fp8"], "dtype: expected fp32 or bf16, got 'fp8'"),
    "long": (["one"], ["--set", "loss.characters=90000"], "loss.characters: expected at most"),
    "context": (["short"], [], "expected at most 64, the model's context"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_bad_input_is_one_line(reason, place, tmp_path, capsys):
    models, extra, expected = REFUSED[reason]
    assert run(place, tmp_path / "out", *models, extra=extra) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert expected in told[-1]
    assert sum("diffattn eval:" in line for line in told) == 1


@pytest.mark.parametrize("size", ["4", "GB", "0GB", "4 XB"])
def test_sizes_of_memory(size, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["eval", "m", "--suite", "loss", "--out", "o", "--memory", size])
    assert ended.value.code == 2
    assert f"expected a size such as 4GB or 500MB, got {size!r}" in capsys.readouterr().err


def test_no_such_suite(place, tmp_path, capsys):
    assert main(["eval", str(place / "one"), "--suite", "los", "--out", str(tmp_path / "o")]) == 2
    assert (
        "suite: expected one of loss, retrieval, attention, icl, got 'los'"
        in capsys.readouterr().err
    )


def test_all_suites_on_arms(place, tmp_path):
    """The two suites side by side; the models' context is long enough for few needles."""
    extra = [*few(samples=2), "--suite", ",".join(PROMPTED)]
    assert run(place, tmp_path / "out", "one", "other", extra=extra) == 0
    names = {path.stem for path in (tmp_path / "out" / "cards").iterdir()}
    assert {"loss", "retrieval", "retrieval-swaps", "retrieval-choice"} <= names
    found = card(tmp_path / "out", "retrieval")
    assert found["content_free"] == 0
    assert found["verdict"] == "undecided"  # two prompts decide nothing
    assert "By depth of the needle" in (tmp_path / "out" / "report.html").read_text()


def test_a_folder_is_not_gone_on_with_by_accident(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(place, out, "one") == 0
    assert run(place, out, "one") == 2
    assert "add --resume" in capsys.readouterr().err
    assert run(place, out, "one", extra=["--resume", "--set", "loss.windows=2"]) == 2
    assert "another one" in capsys.readouterr().err


def test_another_model_under_the_same_name_is_noticed(place, tmp_path, capsys):
    copy, out = tmp_path / "one", tmp_path / "out"
    shutil.copytree(place / "one", copy)
    words = ["eval", str(copy), "--suite", "loss", "--out", str(out), *FAST]
    words += ["--data", str(place / "text.jsonl")]
    assert main(words) == 0
    shutil.copy(place / "other" / "model.safetensors", copy / "model.safetensors")
    assert main([*words, "--resume"]) == 2
    assert "weights: " in capsys.readouterr().err
