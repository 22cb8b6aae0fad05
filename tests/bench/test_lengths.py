"""`diffattn bench lengths`: time and peak memory over length."""

import json

import pytest

from diffattn.bench.memory import peak_memory
from diffattn.bench.sides import Shape, Side
from diffattn.cli import main


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths") / "out"
    options = ("--lengths", "1024", "--width", "16", "--impl", "reference", "--seconds", "0.01")
    assert main(["bench", "lengths", *options, "--out", str(folder)]) == 0
    return folder


def test_memory_is_that_of_the_pass(out):
    (record,) = json.loads((out / "results.json").read_text())["records"].values()
    one_map = 4 * 1024**2
    assert 2 * one_map <= record["memory"]["v1, reference"] <= 20 * one_map
    assert 0 < record["memory"]["softmax, torch"] < 2 * one_map


def test_the_page_draws_time_and_memory(out):
    page = (out / "report.html").read_text()
    assert "time, ms" in page
    assert "peak memory, MiB" in page


def test_a_process_that_fails_says_why(monkeypatch):
    monkeypatch.setattr("diffattn.bench.memory.sys.executable", "/bin/false")
    with pytest.raises(NotImplementedError, match="its memory was not measured: ended with code 1"):
        peak_memory(Side("v1", "sdpa"), Shape(1, 1, 1, 8, 8, 8), "fp32", "cpu")


def test_bad_lengths(tmp_path, capsys):
    for options, expected in (
        (("--lengths", "0"), "lengths: expected a number above 0, got 0"),
        (("--lengths", "64", "64"), "lengths: expected one or more, all different"),
        (("--width", "0"), "width: expected a number above 0, got 0"),
    ):
        assert main(["bench", "lengths", *options, "--out", str(tmp_path / "out")]) == 2
        assert expected in capsys.readouterr().err
