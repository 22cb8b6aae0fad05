"""Tables of results inside documents; README and docs/performance.md are up to date."""

import json
from pathlib import Path

import pytest

from diffattn.bench.pages import with_tables
from diffattn.cli import main

ROOT = Path(__file__).parent.parent.parent
COMMITTED = {
    "README.md": "results/bench/[mo]*/results.json",  # model and operator
    "docs/performance.md": "results/bench/*/results.json",
}
BRIEF = "before\n<!-- speed:begin brief -->\nold\n<!-- speed:end -->\nafter\n"
WHOLE = BRIEF.replace(" brief", "")


@pytest.mark.parametrize("name", COMMITTED)
def test_the_document_is_what_the_committed_results_say(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == with_tables(text, sorted(ROOT.glob(COMMITTED[name])), name), (
        f"run: diffattn bench table {COMMITTED[name]} --readme {name}"
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    tiny = ("--seconds", "0.01", "--impl", "sdpa")
    op, model = out / "op", out / "model"
    shapes = ("--shapes", "1,1,16,8:forward")
    assert main(["bench", "operator", *shapes, *tiny, "--out", str(op)]) == 0
    sizes = ("--width", "32", "--layers", "1", "--heads", "4", "--vocabulary", "50")
    tasks = ("--training", "1x16", "--decoding", "16")
    assert main(["bench", "model", *sizes, *tasks, *tiny, "--out", str(model)]) == 0
    return op / "results.json", model / "results.json"


def test_only_the_block_is_written_and_twice_is_once(results, tmp_path):
    for text, expected in ((BRIEF, "| shape | softmax | V1 | V2 |"), (WHOLE, "| v1, sdpa |")):
        document = tmp_path / "page.md"
        document.write_text(text)
        arguments = ["bench", "table", *map(str, results), "--readme", str(document)]
        assert main(arguments) == 0
        written = document.read_text()
        assert written.startswith("before\n<!-- speed:begin")
        assert written.endswith("<!-- speed:end -->\nafter\n")
        assert "old" not in written
        assert expected in written
        assert "`diffattn bench operator --shapes 1,1,16,8:forward" in written
        assert main(arguments) == 0
        assert document.read_text() == written


def test_a_document_that_is_out_of_date_is_seen(results, tmp_path):
    changed = tmp_path / "results.json"
    found = json.loads(results[0].read_text())
    (record,) = found["records"].values()
    record["seconds"]["v1, sdpa"] = [3 * time for time in record["seconds"]["v1, sdpa"]]
    changed.write_text(json.dumps(found))
    for page in (BRIEF, WHOLE):
        text = with_tables(page, results[:1])
        assert text == with_tables(text, results[:1])
        assert text != with_tables(text, [changed])


def test_what_cannot_be_written_is_one_line(results, tmp_path, capsys):
    page, other = tmp_path / "page.md", tmp_path / "other.json"
    page.write_text("no block")
    other.write_text("{}")
    for arguments, expected in (
        ([str(results[0]), "--readme", str(page)], "readme: expected one pair of"),
        ([str(results[0]), "--readme", str(tmp_path / "none.md")], "readme: expected a file"),
        ([str(tmp_path / "none.json"), "--readme", str(page)], "results: expected a file"),
        ([str(other), "--readme", str(page)], "results: expected what diffattn bench wrote"),
    ):
        if "results:" in expected:
            page.write_text(BRIEF)
        assert main(["bench", "table", *arguments]) == 2
        assert expected in capsys.readouterr().err
