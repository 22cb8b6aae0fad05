"""`diffattn compare` as a whole, at smoke size: verdicts, resume, kills, bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("transformers", reason="comparisons need the extra hf")
pytest.importorskip("matplotlib", reason="the report needs the extra plot")
pytest.importorskip("scipy", reason="intervals need the extra eval")

from diffattn.cli import arguments, main
from diffattn.compare import ARM_NAMES, PRESET_NAMES, get_preset


def verdicts(folder, arm):
    results = json.loads((folder / "results.json").read_text())
    return {row["measure"]: row["verdict"] for row in results["comparisons"] if row["arm"] == arm}


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """The Transformer against itself, as a person would run it."""
    out = tmp_path_factory.mktemp("compare") / "twice"
    code = main(
        ["compare", "--arms", "transformer,transformer", "--preset", "smoke", "--out", str(out)]
    )
    assert code == 0
    return out


def test_the_same_model_twice_is_no_difference_on_every_measure(twice):
    told = verdicts(twice, "transformer#2")
    results = json.loads((twice / "results.json").read_text())
    assert set(told) == {measure["name"] for measure in results["measures"]}
    assert {"heldout_loss", "recall", "attention_answer", "tokens_per_second"} <= set(told)
    assert set(told.values()) == {"no difference"}
    differences = {row["measure"]: row["difference"] for row in results["comparisons"]}
    assert differences["heldout_loss"] != 0.0, "the second has starting weights of its own"


def test_results_say_what_was_compared(twice):
    results = json.loads((twice / "results.json").read_text())
    assert results["seeds"] == [0, 1, 2]
    assert "--arms transformer,transformer --preset smoke --seeds 3" in results["command"]
    assert results["data"]["documents_heldout"] >= 1
    assert results["peak_memory_bytes"] < 4 * 2**30
    for arm in results["arms"]:
        assert arm["parameters"] > arm["parameters_non_embedding"] > 0
        assert arm["flops_per_token"] > 6 * arm["parameters_non_embedding"]
        for run in arm["runs"]:
            assert run["curve"][-1]["tokens"] == arm["tokens"]
            assert run["curve"][-1]["heldout_loss"] < 6.4, "it learned something"
    page = (twice / "report.html").read_text()
    assert "no difference" in page
    assert "<svg" in page


def test_models_of_the_runs_load_as_they_are(twice, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import diffattn.models  # noqa: F401 registers the classes

    folder = twice / "runs" / "transformer" / "seed0" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.attention == "softmax"
    # with the tokenizer beside it: the folder needs nothing else
    shutil.copytree(folder, tmp_path / "alone")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "alone")
    prompt = tokenizer.bos_token + "The state of the Union"
    assert tokenizer.decode(tokenizer(prompt)["input_ids"]) == prompt
    prepared = AutoTokenizer.from_pretrained(twice / "data" / "tokenizer")
    assert tokenizer.get_vocab() == prepared.get_vocab()
    told = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=3)
    assert told.shape[1] == len(tokenizer(prompt)["input_ids"]) + 3
    assert not list(twice.rglob("checkpoint-*"))


def test_a_finished_comparison_is_not_repeated(twice):
    runs = sorted(twice.glob("runs/*/*/result.json"))
    before = [path.stat().st_mtime_ns for path in runs]
    results = (twice / "results.json").read_bytes()
    arguments = ["compare", "--arms", "transformer,transformer", "--preset", "smoke"]
    assert main([*arguments, "--out", str(twice), "--resume", "--jobs", "1"]) == 0
    assert [path.stat().st_mtime_ns for path in runs] == before
    # speed, time, memory and date are those of the work that was done
    assert (twice / "results.json").read_bytes() == results


def test_an_existing_comparison_is_not_overwritten(twice, capsys):
    arguments = ["compare", "--arms", "transformer,transformer", "--preset", "smoke"]
    assert main([*arguments, "--out", str(twice)]) == 2
    assert "add --resume" in one_line(capsys)
    assert main([*arguments, "--seeds", "2", "--out", str(twice), "--resume"]) == 2
    assert "belongs to another comparison (seeds there is 3, here 2)" in one_line(capsys)
    assert (twice / "results.json").exists()


def test_a_comparison_may_grow_in_seeds(twice, tmp_path):
    out = tmp_path / "grown"
    shutil.copytree(twice, out)
    before = json.loads((out / "results.json").read_text())
    runs = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*/result.json")}
    arguments = ["compare", "--arms", "transformer,transformer", "--preset", "smoke"]
    arguments += ["--out", str(out), "--resume"]
    assert main([*arguments, "--seeds", "4"]) == 0
    after = json.loads((out / "results.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    assert after["seeds"] == [0, 1, 2, 3]
    for earlier, later in zip(before["arms"], after["arms"], strict=True):
        assert later["runs"][:3] == earlier["runs"], "what was measured stays, speed too"
        assert [run["seed"] for run in later["runs"]] == [0, 1, 2, 3]
    assert after["family"]["degrees_of_freedom"] == 3
    assert after["wall_seconds"] > before["wall_seconds"]
    assert after["peak_memory_bytes"] >= before["peak_memory_bytes"]
    assert any("Seeds were added after results of 3" in note for note in after["notes"])
    assert not any("Seeds were added" in note for note in before["notes"])


def test_a_planted_handicap_is_found(tmp_path):
    out = tmp_path / "handicap"
    arms = "transformer,transformer:lr=0.1"
    assert main(["compare", "--arms", arms, "--preset", "smoke", "--out", str(out)]) == 0
    assert verdicts(out, "transformer@lr0.1")["heldout_loss"] == "worse"


def one_line(capsys):
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(told) == 1, told
    return told[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "transformer,diff-v9"], "did you mean diff-v"),
        (["--preset", "huge"], "preset: expected one of smoke, quick, laptop, gpu, got 'huge'"),
        (["--seeds", "0"], "seeds: expected at least 1, got 0"),
        (["--seeds", "many"], "argument --seeds: invalid int value: 'many'"),
        (["--tokens", "10"], "tokens: expected at least"),
        (["--data", "{tmp}/nothing.txt"], "data"),
        (["--tokenizer", "{tmp}"], "tokenizer"),
        (["--data", "{tmp}/empty.txt"], "data"),
        (["--data", "{tmp}/binary.txt"], "data"),
        (["--data", "{tmp}/latin.txt"], "data"),
        (["--data", "{tmp}/short.txt"], ""),
        (["--tokens", "9" * 40], "tokens: expected 1 to"),
        (["--tokens", "1.5"], "--tokens: expected a whole number such as 2000000, 2e6 or 2M"),
        (["--tokens", "1e999999999"], "--tokens: expected a whole number"),
        (["--tokens", "1e-999999999"], "--tokens: expected a whole number"),
        (["--tokens", "inf"], "--tokens: expected a whole number"),
        (["--tokens", "M"], "--tokens: expected a whole number"),
        (["--data", "{tmp}/table.csv"], "table.csv holds records, not text (.csv)"),
        (["--jobs", "0"], "jobs: expected at least 1, got 0"),
        (["--out", "/proc/nowhere/out"], "out: cannot write"),
        (["--out", "~nobody-of-this-name/out"], "out: expected a path"),
        (["--data", "{tmp}/few.txt", "--preset", "quick"], "vocab_size: expected at most"),
        (["--wrong"], "unrecognized arguments"),
        (["--out", "{tmp}/empty.txt"], "out: cannot write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01" * 500)
    (tmp_path / "latin.txt").write_bytes("Fahrvergn\xfcgen ".encode("latin-1") * 500)
    (tmp_path / "few.txt").write_text(
        "\n\n".join(f"Line {i} of a short text. " * 60 for i in range(12))
    )
    (tmp_path / "table.csv").write_text("id,text\n" + "1,words and words\n" * 5000)
    (tmp_path / "short.txt").write_text("Too short.\n\nEven with two paragraphs.\n")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    try:
        code = main(["compare", "--preset", "smoke", *arguments, *out])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("16000", 16_000), ("16_000", 16_000), ("2e6", 2_000_000), ("2M", 2_000_000)),
        *(("1.5k", 1500), ("1G", 10**9), ("1b", 10**9), ("9" * 40, 10**40 - 1)),
    ],
)
def test_tokens_may_be_written_as_people_do(text, count):
    assert arguments.count(text) == count


def test_help_explains_arms_and_presets_without_loading_the_rest():
    code = "import sys; from diffattn.cli import main\ntry: main(['compare', '--help'])\n"
    code += "except SystemExit: print('transformers' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = " ".join(told.stdout.split())
    assert told.stdout.splitlines()[-1] == "False"
    for name in (*ARM_NAMES, *PRESET_NAMES):
        assert f" {name} " in lines
    assert get_preset("quick").about in lines
    assert "N/2 heads of 2 D" in lines


def command(out, *more):
    return [
        sys.executable,
        *("-m", "diffattn", "compare", "--arms", "transformer,diff-v1", "--preset", "smoke"),
        *("--seeds", "1", "--tokens", "60000", "--out", str(out), *more),
    ]


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def training_has_saved(out):
    return lambda: any(out.glob("runs/*/seed0/checkpoint-*/complete.json"))


def test_ctrl_c_stops_cleanly_and_kill_9_loses_nothing(tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(command(out), stderr=subprocess.PIPE, text=True)
    wait_for(training_has_saved(out))
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped; what ran is saved, add --resume to go on" in told
    assert "Traceback" not in told

    process = subprocess.Popen(
        command(out, "--resume"), stderr=subprocess.DEVNULL, start_new_session=True
    )
    metrics = out / "runs" / "diff-v1" / "seed0" / "metrics.jsonl"
    size = metrics.stat().st_size
    wait_for(lambda: metrics.stat().st_size != size)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    torn = out / "runs" / "diff-v1" / "seed0" / "checkpoint-999"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")

    done = subprocess.run(command(out, "--resume"), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    results = json.loads((out / "results.json").read_text())
    assert {row["verdict"] for row in results["comparisons"]} == {"no difference"}
    assert {row["reason"] for row in results["comparisons"]} == {"one seed gives no interval"}
    assert all(row["interval"] is None for row in results["comparisons"])
    sessions = json.loads((out / "sessions.json").read_text())
    assert [session["finished"] for session in sessions] == [False, True], "not the killed one"
    assert results["wall_seconds"] == sum(session["wall_seconds"] for session in sessions)


def test_a_worker_that_is_killed_is_one_line(tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen([*command(out), "--seeds", "2"], stderr=subprocess.PIPE, text=True)
    wait_for(training_has_saved(out))
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(children[0]), signal.SIGKILL)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "a worker process was killed from outside" in told.strip().splitlines()[-1]
    assert "Traceback" not in told


def test_a_disk_that_fills_up_is_one_line(tmp_path):
    # a limit on the size of files stands for a full disk: writing a checkpoint fails half way
    out = tmp_path / "out"
    limited = f"ulimit -f 800; exec {' '.join(command(out))}"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert "diffattn compare: out: cannot write" in last
    assert "Traceback" not in done.stderr
