"""`diffattn bench operator`: correctness first, ratios, what is left out, resume, bad input."""

import json
import shlex
import sys
import time

import pytest
import torch

from diffattn.bench import operator, timing
from diffattn.bench.accuracy import LIMIT, error_ratio
from diffattn.bench.sides import BASE, DTYPES, FORMS, Side, of_transformer, sides_of
from diffattn.cli import main
from diffattn.ops import IMPLEMENTATIONS

TINY = "1,1,16,8"
QUICK = ("--seconds", "0.01", "--impl", "sdpa")


def command(out, *more, shapes=(f"{TINY}:forward",)):
    return ["bench", "operator", "--shapes", *shapes, *QUICK, "--out", str(out), *more]


def read(out):
    return json.loads((out / "results.json").read_text())


def test_every_implementation_is_right_at_every_width_and_dtype():
    for dtype in DTYPES.values():
        for sizes in ((1, 1, 16, 8), (2, 2, 40, 24)):
            for side in sides_of(FORMS, ("reference", "sdpa")):
                assert error_ratio(side, of_transformer(side.form, *sizes), dtype) <= LIMIT


def test_all_sides_are_timed_or_left_out_with_a_reason(tmp_path, capsys):
    arguments = ["bench", "operator", "--shapes", TINY, "--seconds", "0.01"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    results, printed = read(tmp_path / "out"), capsys.readouterr()
    assert list(results["records"]) == [f"{TINY} forward", f"{TINY} forward + backward"]
    for record in results["records"].values():
        names = {side.name for side in (BASE, *sides_of(FORMS, IMPLEMENTATIONS))}
        assert set(record["seconds"]) | set(record["left_out"]) == names
        assert set(record["errors"]) == set(record["seconds"])
        assert not record["wrong"]
        assert all(len(times) >= timing.ROUNDS for times in record["seconds"].values())
        for name, reason in record["left_out"].items():
            assert f"  {name} left out: {reason}" in printed.err
    assert "[1/2]" in printed.err
    assert " left" in printed.err
    assert "v1, sdpa" in printed.out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<svg" in page
    assert "softmax, torch" in page


def test_results_name_the_machine_and_a_command_that_measures_the_same(tmp_path):
    assert main(command(tmp_path / "out")) == 0
    results = read(tmp_path / "out")
    assert results["machine"]["threads"] == 1
    assert results["machine"]["torch"] == torch.__version__
    words = shlex.split(results["command"])
    assert words[0] == "diffattn"
    words[words.index("DIR")] = str(tmp_path / "again")
    assert main(words[1:]) == 0
    assert read(tmp_path / "again")["settings"] == results["settings"]


def test_ratios_are_taken_turn_by_turn_and_to_both_bases():
    record = {
        "seconds": {
            "softmax, torch": [1.0, 2.0, 4.0],
            "softmax, sdpa": [2.0, 2.0, 2.0],
            "v1, sdpa": [2.0, 6.0, 20.0],
            "v1, one_call": [1.0, 1.0, 1.0],
        }
    }
    to_torch, to_own = timing.ratios(record)["v1, sdpa"]
    assert to_torch == (2.5, 3.0, 4.0)
    assert to_own == (2.0, 3.0, 6.5)
    assert timing.ratios(record)["v1, one_call"][1] is None


WRONG = {
    "output": lambda out: 1.01 * out,
    "gradient": lambda out: out.detach() + 0.99 * (out - out.detach()),
    "NaN": lambda out: out * float("nan"),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_wrong_side_is_an_error_and_no_time(what, planted, tmp_path, capsys):
    planted("sdpa", WRONG[what])
    assert main(command(tmp_path / "out")) == 1
    (record,) = read(tmp_path / "out")["records"].values()
    assert set(record["wrong"]) == {"v1, sdpa", "v2, sdpa"}
    assert set(record["seconds"]) == {"softmax, torch", "softmax, sdpa"}
    printed = capsys.readouterr()
    assert "v1, sdpa is wrong: its error is" in printed.err
    assert "wrong" in printed.out


def test_an_implementation_that_cannot_serve_is_left_out(planted, tmp_path, capsys):
    def refuse(out):
        raise NotImplementedError("there is no compiler")

    planted("sdpa", refuse)
    assert main(command(tmp_path / "out")) == 0
    assert "v1, sdpa left out: there is no compiler" in capsys.readouterr().err


def test_whole_maps_that_do_not_fit_are_left_out(monkeypatch):
    monkeypatch.setattr(timing, "_free", lambda device: 1000)
    shapes = {side: of_transformer(side.form, 1, 1, 16, 8) for side in (BASE, Side("v1", "sdpa"))}
    shapes[Side("v1", "reference")] = shapes[Side("v1", "sdpa")]
    record = timing.timed(shapes, "forward", "fp32", "cpu", 0.01)
    assert list(record["seconds"]) == ["softmax, torch", "v1, sdpa"]
    assert record["left_out"]["v1, reference"].startswith("whole maps take about 8.0 KiB")


def test_a_resumed_folder_measures_only_what_is_new(tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert main(command(out)) == 0
    before = read(out)["records"]
    asked = []
    real = operator.measure

    def counted(settings, task):
        asked.append(task)
        return real(settings, task)

    monkeypatch.setattr(operator, "measure", counted)
    assert main(command(out, "--resume")) == 0
    assert asked == []
    assert read(out)["records"] == before
    shapes = (f"{TINY}:forward", "1,1,24,8:forward")
    assert main(command(out, "--resume", shapes=shapes)) == 0
    assert asked == [((1, 1, 24, 8), "forward")]
    assert list(read(out)["records"]) == [f"{TINY} forward", "1,1,24,8 forward"]


def test_a_stopped_run_keeps_what_was_measured(tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = operator.measure

    def stops(settings, task):
        if task[1] != "forward":
            raise KeyboardInterrupt
        return real(settings, task)

    monkeypatch.setattr(operator, "measure", stops)
    assert main(command(out, shapes=(TINY,))) == 130
    kept = read(out)["records"]
    assert list(kept) == [f"{TINY} forward"]
    monkeypatch.setattr(operator, "measure", real)
    assert main(command(out, "--resume", shapes=(TINY,))) == 0
    assert read(out)["records"][f"{TINY} forward"] == kept[f"{TINY} forward"]
    assert len(read(out)["records"]) == 2


def refused(capsys, arguments):
    """The one line that refuses a command."""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


BAD = {
    "zero": (("--shapes", "1,0,16,8"), "shapes: expected B,PAIRS,TOKENS,HEAD_DIM"),
    "words": (("--shapes", "large"), "got 'large'"),
    "too few": (("--shapes", "1,2,3"), "got '1,2,3'"),
    "pass": (("--shapes", f"{TINY}:backward"), "shapes: expected nothing or forward after ':'"),
    "twice": (("--shapes", TINY, TINY), "shapes: expected one or more, all different"),
    "dtype": (("--dtype", "fp8"), "dtype: expected one of fp32, bf16, got 'fp8'"),
    "device": (("--device", "tpu"), "device: expected one of cpu, cuda, got 'tpu'"),
    "impl": (("--impl", "flash"), "impl: expected one of reference, sdpa"),
    "all and more": (("--impl", "all", "sdpa"), "got 'all'"),
    "seconds": (("--seconds", "0"), "seconds: expected a number above 0, got 0.0"),
    "endless": (("--seconds", "inf"), "seconds: expected a number above 0, got inf"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_one_line(case, tmp_path, capsys):
    options, expected = BAD[case]
    out = tmp_path / "out"
    assert expected in refused(capsys, ["bench", "operator", *options, "--out", str(out)])
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here(tmp_path, capsys):
    line = refused(capsys, command(tmp_path, "--device", "cuda"))
    assert "there is no CUDA device" in line


def test_folders_of_others(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep me")
    assert "out: expected a new folder" in refused(capsys, command(out))
    assert "holds no benchmark" in refused(capsys, command(out, "--resume"))
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_other_settings_do_not_join_a_folder(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(command(out)) == 0
    capsys.readouterr()
    assert "add --resume" in refused(capsys, command(out))
    line = refused(capsys, command(out, "--resume", "--dtype", "bf16"))
    assert "dtype: expected 'fp32'" in line
    (out / "results.json").write_text("{")
    assert "is damaged" in refused(capsys, command(out, "--resume"))


def test_the_command_starts_without_what_models_need(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "diffattn.bench.model", raising=False)
    assert main(command(tmp_path / "out")) == 0
    assert "diffattn.bench.model" not in sys.modules


def test_a_slow_side_is_seen_as_slow(planted, tmp_path):
    def slow(out):
        time.sleep(0.02)
        return out

    planted("sdpa", slow)
    assert main(command(tmp_path / "out")) == 0
    (record,) = read(tmp_path / "out")["records"].values()
    assert min(record["seconds"]["v1, sdpa"]) >= 0.02
    assert timing.ratios(record)["v1, sdpa"][1].middle > 1
