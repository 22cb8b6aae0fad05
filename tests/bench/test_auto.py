"""`diffattn bench auto`: the rule of impl="auto" holds, or the command says where not."""

import json
import time

from diffattn.bench.auto import Settings, beside_best
from diffattn.cli import main

CASES = ("v1:1,2,1,1,24,8:bf16:forward", "v2:1,2,2,16,16,8:fp32:both")


def command(out, *more):
    cases = ("--cases", *CASES, "--seconds", "0.01")
    return ["bench", "auto", *cases, "--out", str(out), *more]


def test_the_default_cases_are_varied():
    tasks = Settings().tasks().values()
    assert len(tasks) >= 12
    assert {dtype for _, _, dtype, _ in tasks} == {"fp32", "bf16"}
    assert len({kind for _, _, _, kind in tasks}) == 2
    assert len({form for form, *_ in tasks}) == 3
    shapes = [shape for _, shape, _, _ in tasks]
    assert any(shape.groups < shape.heads for shape in shapes)
    assert any(shape.queries == 1 < shape.keys for shape in shapes)


def test_auto_beside_every_implementation(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(command(out, "--tolerance", "1000")) == 0
    records = json.loads((out / "results.json").read_text())["records"]
    assert list(records) == list(CASES)
    assert {"v1, auto", "v1, reference", "v1, sdpa"} <= set(records[CASES[0]]["seconds"])
    assert "within 1e+05 %" in capsys.readouterr().out


def test_a_slow_rule_fails(planted, tmp_path, capsys):
    def slow(out):
        time.sleep(0.03)
        return out

    planted("auto", slow)
    assert main(command(tmp_path / "out")) == 1
    printed = capsys.readouterr()
    for case in CASES:
        assert f"{case}: impl='auto' takes" in printed.err
    assert "NO" in printed.out


def test_the_fastest_is_named_and_auto_compared_with_it_in_the_same_turns():
    times = {"v1, auto": [2.0, 3.0, 9.0], "v1, a": [2.0, 2.0, 3.0], "v1, b": [3.0, 3.0, 3.0]}
    best, beside = beside_best({"seconds": times})
    assert best == "v1, a"
    assert beside.middle == 1.5
    assert beside_best({"seconds": {"v1, a": [1.0]}}) is None


def test_bad_cases(tmp_path, capsys):
    for case, expected in (
        ("v1", "cases: expected FORM:B,H,G,T,S,HEAD_DIM:DTYPE:PASS, got 'v1'"),
        ("v3:1,1,1,1,1,8:fp32:both", "cases: expected one of softmax, v1, v2, got 'v3'"),
        ("v1:1,1,1,1,8:fp32:both", "whole numbers above 0, got '1,1,1,1,8'"),
        ("v1:1,3,2,1,1,8:fp32:both", "cases: expected G that divides H"),
        ("v1:1,1,1,1,1,8:fp16:both", "cases: expected one of fp32, bf16, got 'fp16'"),
        ("v1:1,1,1,1,1,8:fp32:backward", "cases: expected one of forward, both"),
    ):
        assert main(["bench", "auto", "--cases", case, "--out", str(tmp_path / "out")]) == 2
        assert expected in capsys.readouterr().err
