"""Reading documents, splitting them, saying what is wrong with bad input."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
from pathlib import Path

import pytest

from diffattn.data import Document, corpus_digest, load_documents, split_documents
from diffattn.errors import UserError


def some_documents(count: int) -> list[Document]:
    return [Document(str(k), f"text number {k}") for k in range(count)]


def message_of(source: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_documents(source)
    message = str(caught.value)
    assert message.startswith("data: ")
    assert "\n" not in message
    return message


def test_bundled_corpus_is_complete() -> None:
    documents = load_documents(None)
    assert len(documents) == 233
    assert sum(len(document.text) for document in documents) == 10_759_787
    assert len({document.name for document in documents}) == 233


def test_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {k} " + "word " * 300 for k in range(20)]
    text = "\n\n".join(paragraphs)
    (tmp_path / "book.txt").write_text(text)
    documents = load_documents(tmp_path / "book.txt")
    assert len(documents) > 3
    assert "".join(document.text for document in documents) == text
    assert all(len(document.text) >= 4_000 for document in documents)
    assert all(document.text.startswith("paragraph") for document in documents)
    assert documents == load_documents(str(tmp_path / "book.txt"))


@pytest.mark.parametrize("unit", ["line of text\n", "line of text\r\n", "word ", "字"])
def test_text_without_blank_lines_is_cut(tmp_path: Path, unit: str) -> None:
    text = unit * (30_000 // len(unit))
    (tmp_path / "long.txt").write_bytes(text.encode())
    documents = load_documents(tmp_path / "long.txt")
    assert "".join(document.text for document in documents) == text
    assert all(4_000 <= len(document.text) < 8_000 for document in documents)
    if unit.endswith("\n"):
        assert all(document.text.endswith("\n") for document in documents)


def test_one_blank_line_does_not_stop_the_cutting(tmp_path: Path) -> None:
    text = "preface " * 600 + "\n\n" + "line of text\n" * 5_000
    (tmp_path / "long.txt").write_text(text)
    assert max(len(d.text) for d in load_documents(tmp_path / "long.txt")) < 8_000


def test_short_text_is_one_document_and_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    documents = load_documents(tmp_path / "short.txt")
    assert [document.text for document in documents] == ["too short"]
    with pytest.raises(UserError, match=r"data: expected at least 2 different documents.*got 1"):
        split_documents(documents)


def test_folder_is_read_recursively_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "z.txt").write_text("last")
    (tmp_path / "b" / "deep.md").write_text("deep")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "code.py").write_text("ignored")
    (tmp_path / ".git" / "hidden.txt").write_text("ignored")
    documents = load_documents(tmp_path)
    assert [(d.name, d.text) for d in documents] == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "two"),
        ("b/deep.md", "deep"),
        ("z.txt", "last"),
    ]


def test_folder_with_one_text_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("line of text\n" * 5_000)
    in_folder = load_documents(tmp_path)
    assert len(in_folder) > 1
    assert in_folder == load_documents(tmp_path / "only.txt")


@pytest.mark.parametrize(
    ("suffix", "opener"),
    [("", open), (".gz", gzip.open), (".xz", lzma.open)],
    ids=["plain", "gz", "xz"],
)
def test_jsonl_with_every_compression(tmp_path: Path, suffix: str, opener) -> None:
    texts = ["première", "a\u2028b", "tab\there"]
    path = tmp_path / f"docs.jsonl{suffix}"
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        file.writelines(json.dumps({"text": t}, ensure_ascii=False) + "\r\n" for t in texts)
    assert [document.text for document in load_documents(path)] == texts


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert load_documents(tmp_path / "marked.txt")[0].text == "hello"


def test_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", " ", "two"], "id": [1, 2, 3]})
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict(test=rows).save_to_disk(tmp_path / "no_train")
    rows.remove_columns("text").save_to_disk(tmp_path / "no_text")
    for name in ("rows", "splits"):
        assert [document.text for document in load_documents(tmp_path / name)] == ["one", "two"]
    assert "no split `train`; found test" in message_of(tmp_path / "no_train")
    assert "no column `text`; found id" in message_of(tmp_path / "no_text")
    (tmp_path / "rows" / "state.json").write_text("{}")
    assert "not a readable saved data set" in message_of(tmp_path / "rows")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b"", "is empty"),
        ("a.txt", b" \n\n ", "no documents with text"),
        ("a.jsonl", b'{"text": ""}\n', "no documents with text"),
        ("a.bin", b"PK\x03\x04\x00\x00", "binary, not UTF-8 text: NUL at byte 4"),
        ("a.txt", "déjà".encode("utf-16"), "binary"),
        ("a.txt", "déjà".encode("latin-1"), "not UTF-8 text: 0xe9 at byte 1"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n["x"]\n', "a.jsonl:2: expected a JSON object"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "a.jsonl:1 has no field `text`; found body, id"),
        ("a.jsonl", b"{}\n", "no field `text`; found none"),
        ("a.jsonl", b'{"text": 3}\n', "expected a string in `text`, got int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "half a surrogate pair at character 0"),
        ("a.jsonl.gz", b'{"text": "x"}\n', "cannot be decompressed"),
        ("a.jsonl.xz", b'{"text": "x"}\n', "cannot be decompressed"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n', mtime=0)[:-9],  # equal in every worker
            "cannot be decompressed",
        ),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    message = message_of(tmp_path / name)
    assert expected in message
    assert name in message


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.json", ".json"),
        ("a.JSON", ".json"),
        ("a.ndjson", ".ndjson"),
        ("a.JSONL", ".jsonl"),
        ("a.jsonl.zst", ".jsonl"),
        ("a.csv", ".csv"),
        ("a.csv.gz", ".csv"),
        ("a.tsv", ".tsv"),
        ("a.parquet", ".parquet"),
        ("a.arrow", ".arrow"),
        ("a.xlsx", ".xlsx"),
    ],
)
def test_records_are_not_trained_on_as_text(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text('{"text": "x"}\n' * 2000)
    message = message_of(tmp_path / name)
    assert f"{name} holds records, not text ({kind}); expected a text file, a .jsonl" in message
    assert 'one {"text": ...} a line' in message


def test_digest_of_a_corpus_is_of_its_texts() -> None:
    documents = some_documents(20)
    renamed = [Document("x", document.text) for document in reversed(documents)]
    assert corpus_digest(documents) == corpus_digest(renamed)
    changed = [*documents[1:], Document("0", documents[0].text + ".")]
    assert corpus_digest(changed) != corpus_digest(documents)
    assert corpus_digest(documents[1:]) != corpus_digest(documents)
    assert corpus_digest([*documents, documents[0]]) != corpus_digest(documents)


def test_missing_path(tmp_path: Path) -> None:
    assert "nowhere.txt does not exist; expected a text file" in message_of(
        tmp_path / "nowhere.txt"
    )


def test_folder_without_documents(tmp_path: Path) -> None:
    assert "no .txt, .md, .jsonl" in message_of(tmp_path)
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("\n")
    assert "no documents with text" in message_of(tmp_path)


def test_bad_file_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    assert "bad.txt is not UTF-8 text: 0xff at byte 0" in message_of(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("secret")
    (tmp_path / "a.txt").chmod(0)
    assert "cannot read" in message_of(tmp_path / "a.txt")


def test_failing_read_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("secret")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert message_of(tmp_path / "a.txt").endswith("a.txt: Permission denied")


def test_split_is_disjoint_and_complete() -> None:
    documents = some_documents(1_000)
    train, heldout = split_documents(documents, 0.1)
    assert {d.text for d in train}.isdisjoint(d.text for d in heldout)
    assert sorted(train + heldout, key=lambda d: int(d.name)) == documents
    assert 60 <= len(heldout) <= 140


def test_split_does_not_depend_on_order_or_company() -> None:
    documents = some_documents(300)
    heldout = set(split_documents(documents)[1])
    shuffled = random.Random(0).sample(documents, len(documents))
    assert set(split_documents(shuffled)[1]) == heldout
    more = split_documents(documents + [Document("new", f"new {k}") for k in range(100)])[1]
    assert {d for d in more if d.name != "new"} == heldout


def test_split_is_stable_across_versions() -> None:
    held = [d.name for d in split_documents(some_documents(40), 0.1)[1]]
    assert held == ["25", "28"]  # sha256sum: the first 16 hex digits are below 0.1 * 16^16


def test_duplicates_stay_on_one_side() -> None:
    copies = [Document(f"copy {d.name}", d.text) for d in some_documents(100)]
    train, heldout = split_documents(some_documents(100) + copies, 0.3)
    assert {d.text for d in train}.isdisjoint(d.text for d in heldout)
    assert len(train) + len(heldout) == 200


@pytest.mark.parametrize(("share", "moved"), [(1e-9, "25"), (1 - 1e-9, "1")])
def test_an_empty_side_gets_the_text_nearest_to_the_share(share: float, moved: str) -> None:
    documents = some_documents(40) + [Document("copy", d.text) for d in some_documents(40)]
    train, heldout = split_documents(documents, share)
    smaller, larger = sorted((train, heldout), key=len)
    assert smaller == [d for d in documents if d.text == f"text number {moved}"]
    assert len(larger) == 78
    assert (smaller is heldout) == (share < 0.5)


def test_split_refuses_what_cannot_be_split() -> None:
    with pytest.raises(UserError, match=r"data: expected at least 2"):
        split_documents([Document("a", "same"), Document("b", "same")])
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UserError, match=r"heldout_share"):
            split_documents(some_documents(5), share)
