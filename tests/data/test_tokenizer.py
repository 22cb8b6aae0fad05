"""Training, loading, caching of tokenizers."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import pytest

from diffattn.data import (
    cached_tokenizer,
    load_documents,
    load_tokenizer,
    train_tokenizer,
)
from diffattn.data import (
    tokenizer as tokenizer_module,
)
from diffattn.errors import UserError

pytest.importorskip("transformers")

TEXTS = [document.text[:20_000] for document in load_documents(None)[:8]]
HARD_TEXT = (
    " Déjà vu\t\tnaïve  Ünïcödé\r\n 日本語の文 ,  spaced . 'tis don 't 🙂 \u2028 e\u0301\n\n"
)


@pytest.mark.parametrize("text", [HARD_TEXT, "", " ", "plain text", "\x01\x7f"])
def test_round_trip(text: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text


def test_vocabulary_has_the_size_asked_for_with_three_specials() -> None:
    tokenizer = train_tokenizer(TEXTS, 500)
    assert len(tokenizer) == tokenizer.vocab_size == 500
    specials = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert len(specials) == 3
    assert specials.isdisjoint(tokenizer.encode("<b> text"))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<bos>",
        "<eos>",
        "<pad>",
    )


def test_merges_compress() -> None:
    text = TEXTS[0]
    assert len(train_tokenizer(TEXTS, 800).encode(text)) < len(text.encode()) / 2


def test_training_is_deterministic() -> None:
    first, second = (train_tokenizer(iter(TEXTS), 600).get_vocab() for _ in range(2))
    assert first == second


def test_vocabulary_beyond_the_text_is_refused_with_what_is_possible() -> None:
    with pytest.raises(UserError, match=r"vocab_size: .* at most (\d+).*got 300") as caught:
        train_tokenizer(["abcd abcd efgh"], 300)
    supported = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert 259 < supported < 300
    assert len(train_tokenizer(["abcd abcd efgh"], supported)) == supported


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match=r"vocab_size: expected at least 259 .* got 258"):
        train_tokenizer(TEXTS, 258)


def test_folder_that_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^tokenizer: expected a folder.*absent"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match=r"^tokenizer: no tokenizer could be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"^tokenizer: no tokenizer could be loaded"):
        load_tokenizer(tmp_path)


def test_code_of_a_tokenizer_folder_never_runs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Foreign", "auto_map": {"AutoTokenizer": ["foreign.Foreign", null]}}'
    )
    (tmp_path / "foreign.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Foreign: ..."
    )
    with pytest.raises(UserError, match=r"^tokenizer: "):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def count_trainings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the vocabulary size of every training from here on."""
    trainings: list[int] = []

    def counted(texts, vocab_size):
        trainings.append(vocab_size)
        return train_tokenizer(texts, vocab_size)

    monkeypatch.setattr(tokenizer_module, "train_tokenizer", counted)
    return trainings


def test_cache_is_hit_for_the_same_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = count_trainings(monkeypatch)
    folder = tmp_path / "deep" / "tokenizer"
    first = cached_tokenizer(TEXTS, 400, folder)
    again = cached_tokenizer(TEXTS, 400, folder)
    assert trainings == [400]
    assert first.get_vocab() == again.get_vocab() == train_tokenizer(TEXTS, 400).get_vocab()

    assert len(cached_tokenizer(TEXTS, 450, folder)) == 450
    assert trainings == [400, 450]
    other = cached_tokenizer(TEXTS[1:], 450, folder)
    assert trainings == [400, 450, 450]
    assert other.get_vocab() == train_tokenizer(TEXTS[1:], 450).get_vocab()
    cached_tokenizer([TEXTS[1] + TEXTS[2], *TEXTS[3:]], 450, folder)
    assert len(trainings) == 4
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]


def test_cache_uses_an_empty_folder_but_no_foreign_one(tmp_path: Path) -> None:
    assert len(cached_tokenizer(TEXTS, 300, tmp_path / "new")) == 300
    (tmp_path / "empty").mkdir()
    assert len(cached_tokenizer(TEXTS, 300, tmp_path / "empty")) == 300
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for name in ("mine", "mine/thesis.txt"):
        with pytest.raises(UserError, match=r"^folder: "):
            cached_tokenizer(TEXTS, 300, tmp_path / name)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_failed_training_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vocab_size"):
        cached_tokenizer(["short"], 5_000, tmp_path / "tokenizer")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stale", [False, True], ids=["empty", "stale"])
def test_loser_of_a_race_keeps_the_winners_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    folder = tmp_path / "tokenizer"
    if stale:
        cached_tokenizer(TEXTS, 300, folder)

    def lose(texts, vocab_size):
        monkeypatch.setattr(tokenizer_module, "train_tokenizer", train_tokenizer)
        cached_tokenizer(texts, vocab_size, folder)
        (folder / "winner").touch()
        return train_tokenizer(texts, vocab_size)

    monkeypatch.setattr(tokenizer_module, "train_tokenizer", lose)
    assert len(cached_tokenizer(TEXTS, 350, folder)) == 350
    assert (folder / "winner").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_concurrent_callers_all_get_the_tokenizer(tmp_path: Path) -> None:
    sizes: list[int] = []
    barrier = threading.Barrier(4)

    def call() -> None:
        barrier.wait()
        sizes.append(len(cached_tokenizer(TEXTS[:2], 300, tmp_path / "tokenizer")))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [300] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_damaged_cache_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    cached_tokenizer(TEXTS, 300, folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"^tokenizer: no tokenizer could be loaded"):
        cached_tokenizer(TEXTS, 300, folder)
    shutil.rmtree(folder)
    assert len(cached_tokenizer(TEXTS, 300, folder)) == 300


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"`tokenizers`: pip install 'diffattn\[hf\]'"):
        train_tokenizer(TEXTS, 300)
