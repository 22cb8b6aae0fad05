"""Token files on disk, windows over them, the training stream."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from diffattn.data import (
    Document,
    RecallSpec,
    RecallStream,
    RecallTokens,
    TokenFile,
    TrainingStream,
    Windows,
    load_documents,
    train_tokenizer,
    write_tokens,
)
from diffattn.errors import UserError

pytest.importorskip("transformers")

DOCUMENTS = [Document(d.name, d.text[:6_000]) for d in load_documents(None)[:70]]
TOKENIZER = train_tokenizer([document.text for document in DOCUMENTS], 400)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return write_tokens(DOCUMENTS, TOKENIZER, tmp_path_factory.mktemp("tokens") / "train.bin")


def decoded(file: TokenFile, document: int) -> str:
    ids = file.read(int(file.offsets[document]), int(file.offsets[document + 1]))
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def test_every_document_is_bos_text_eos(tokens: TokenFile) -> None:
    ids = tokens.read(0, tokens.tokens)
    starts, ends = tokens.offsets[:-1], tokens.offsets[1:]
    assert np.array_equal(np.flatnonzero(ids == TOKENIZER.bos_token_id), starts)
    assert np.array_equal(np.flatnonzero(ids == TOKENIZER.eos_token_id), ends - 1)
    for number in (0, 63, 64, 69):
        assert decoded(tokens, number) == DOCUMENTS[number].text


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_policy(tmp_path: Path, bos: bool, eos: bool) -> None:
    file = write_tokens(DOCUMENTS[:3], TOKENIZER, tmp_path / "t.bin", bos=bos, eos=eos)
    ids = file.read(0, file.tokens).tolist()
    assert ids.count(TOKENIZER.bos_token_id) == 3 * bos
    assert ids.count(TOKENIZER.eos_token_id) == 3 * eos
    assert file.bos_id == (TOKENIZER.bos_token_id if bos else None)
    assert file.text_tokens == file.tokens - 3 * bos - 3 * eos
    assert decoded(file, 1) == DOCUMENTS[1].text


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_policy_asks_for_a_token_that_is_missing(tmp_path: Path, name: str) -> None:
    bare = pickle.loads(pickle.dumps(TOKENIZER))
    setattr(bare, f"{name}_token", None)
    with pytest.raises(UserError, match=f"^{name}: the tokenizer has no {name.upper()} token"):
        write_tokens(DOCUMENTS[:1], bare, tmp_path / "t.bin")
    assert list(tmp_path.iterdir()) == []
    policy = {name: False}
    assert write_tokens(DOCUMENTS[:1], bare, tmp_path / "t.bin", **policy).tokens > 0


def test_special_names_in_a_text_are_text(tmp_path: Path) -> None:
    document = Document("html", "<bos> is how it starts, <eos> how it ends")
    file = write_tokens([document], TOKENIZER, tmp_path / "t.bin")
    ids = file.read(0, file.tokens).tolist()
    assert ids.count(TOKENIZER.bos_token_id) == ids.count(TOKENIZER.eos_token_id) == 1
    assert TOKENIZER.decode(ids[1:-1]) == document.text


def test_a_tokenizer_that_adds_specials_adds_none_here(tmp_path: Path) -> None:
    from tokenizers import processors

    eager = pickle.loads(pickle.dumps(TOKENIZER))
    eager.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", eager.bos_token_id)]
    )
    assert eager.encode("x")[0] == eager.bos_token_id
    file = write_tokens(DOCUMENTS[:2], eager, tmp_path / "t.bin")
    assert file.read(0, file.tokens).tolist().count(eager.bos_token_id) == 2


def test_sidecar_accounts_for_the_file(tokens: TokenFile) -> None:
    payload = tokens.path.read_bytes()
    record = json.loads(tokens.path.with_name("train.bin.json").read_text())
    assert tokens.path.stat().st_size == 2 * tokens.tokens
    assert record["sha256"] == tokens.sha256 == hashlib.sha256(payload).hexdigest()
    assert tokens.text_bytes.tolist() == [len(d.text.encode()) for d in DOCUMENTS]
    assert np.array_equal(np.frombuffer(payload, "<u2"), tokens.read(0, tokens.tokens))
    total = sum(len(d.text.encode()) for d in DOCUMENTS)
    assert tokens.bytes_per_token == pytest.approx(total / tokens.tokens)


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_ids_choose_the_width(tmp_path: Path, size: int, dtype: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{k}": k for k in range(size)}, unk_token="w0")
    large = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    document = Document("a", f"w{size - 1}")
    file = write_tokens([document], large, tmp_path / "t.bin", bos=False, eos=False)
    assert file.dtype == np.dtype(dtype)
    assert file.read(0, 1).tolist() == [size - 1]


def test_same_input_same_bytes(tokens: TokenFile, tmp_path: Path) -> None:
    again = write_tokens(iter(DOCUMENTS), TOKENIZER, tmp_path / "t.bin")
    assert again.path.read_bytes() == tokens.path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.bin.json"]


def test_rewriting_replaces_both_files(tmp_path: Path) -> None:
    old = write_tokens(DOCUMENTS[:2], TOKENIZER, tmp_path / "t.bin")
    new = write_tokens(DOCUMENTS[2:3], TOKENIZER, tmp_path / "t.bin")
    assert new.tokens < old.tokens
    assert TokenFile.open(tmp_path / "t.bin").sha256 == new.sha256 != old.sha256


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data: expected tokens .*documents: 0\)"):
        write_tokens([], TOKENIZER, tmp_path / "t.bin")
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    sidecar = tmp_path / "t.bin.json"
    with pytest.raises(UserError, match=r"^token file: cannot read .*t\.bin\.json"):
        TokenFile.open(path)
    file = write_tokens(DOCUMENTS[:2], TOKENIZER, path)
    payload, record = path.read_bytes(), sidecar.read_text()
    path.write_bytes(payload[:-2])
    with pytest.raises(UserError, match=f"expected {2 * file.tokens} bytes .* got"):
        TokenFile.open(path)
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read .*t\.bin: "):
        TokenFile.open(path)
    path.write_bytes(payload)
    for damaged in (record[:-1], "[]", "{}", record.replace("<u2", "<q9")):
        sidecar.write_text(damaged)
        with pytest.raises(UserError, match=r"t\.bin\.json is damaged"):
            TokenFile.open(path)
    sidecar.write_text(record)
    assert TokenFile.open(path).tokens == file.tokens
    file.verify()
    path.write_bytes(bytes([payload[0] ^ 1]) + payload[1:])
    with pytest.raises(UserError, match=r"^token file: .*t\.bin is damaged: expected SHA-256"):
        TokenFile.open(path).verify()


def test_pickle_carries_the_path_alone(tokens: TokenFile) -> None:
    tokens.read(0, 10)
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 600
    assert np.array_equal(pickle.loads(pickled).read(0, 50), tokens.read(0, 50))
    windows = Windows(tokens, 32, seed=1)
    assert np.array_equal(pickle.loads(pickle.dumps(windows))[5], windows[5])


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_windows_cover_the_stream_once_per_epoch(tokens: TokenFile, seed: int | None) -> None:
    windows = Windows(tokens, 100, seed)
    expected = tokens.read(0, len(windows) * 100).reshape(-1, 100)
    assert tokens.tokens - expected.size < 100
    for epoch in range(1 if seed is None else 3):
        rows = [windows[epoch * len(windows) + k] for k in range(len(windows))]
        assert all(row.dtype == np.int64 for row in rows)
        assert sorted(map(bytes, rows)) == sorted(map(bytes, expected))


def test_window_order(tokens: TokenFile) -> None:
    plain, seeded, other = (Windows(tokens, 64, seed) for seed in (None, 0, 1))
    n = len(plain)
    assert np.array_equal(np.concatenate(list(plain)), tokens.read(0, n * 64))
    epochs = [np.stack([seeded[e * n + k] for k in range(n)]) for e in range(2)]
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], np.stack(list(other)))
    assert np.array_equal(epochs[0], np.stack(list(Windows(tokens, 64, 0))))
    far = 1_000 * n + 7
    assert np.array_equal(seeded[far], Windows(tokens, 64, 0)[far])


def test_window_index_out_of_range(tokens: TokenFile) -> None:
    plain = Windows(tokens, 64, None)
    for windows, index in ((plain, len(plain)), (plain, -1), (Windows(tokens, 64, 0), -1)):
        with pytest.raises(IndexError):
            windows[index]


def test_windows_that_cannot_be_cut(tmp_path: Path) -> None:
    file = write_tokens([Document("a", "short")], TOKENIZER, tmp_path / "t.bin")
    assert len(Windows(file, file.tokens, None)) == 1
    expected = f"the text has {file.tokens} tokens, fewer than one window of {file.tokens + 1};"
    with pytest.raises(UserError, match=expected):
        Windows(file, file.tokens + 1, None)
    with pytest.raises(UserError, match=r"length: .* at least 2 tokens, got 1"):
        Windows(file, 1, None)
    with pytest.raises(UserError, match=r"seed: "):
        Windows(file, 2, -1)


def recall_stream(tokens: TokenFile) -> RecallStream:
    bos_id = TOKENIZER.bos_token_id
    spec = RecallSpec(48, 4, 2)
    return RecallStream(RecallTokens(len(TOKENIZER)), tokens, spec, seed=5, bos_id=bos_id)


def is_recall(item: dict[str, np.ndarray]) -> bool:
    return bool((item["labels"] == -100).any())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.29, 1 / 3, 0.5, 0.9, 1.0])
def test_mixture_share_is_kept_at_every_step(tokens: TokenFile, share: float) -> None:
    stream = TrainingStream(
        Windows(tokens, 48, 0), [(0, recall_stream(tokens))], recall_share=share,
        rows_per_step=3, steps=100,
    )  # fmt: skip
    assert len(stream) == 300
    kinds = np.array([is_recall(item) for item in map(stream.__getitem__, range(300))])
    by_step = kinds.reshape(100, 3)
    assert np.array_equal(by_step.all(axis=1), by_step.any(axis=1))
    recall_steps = np.cumsum(by_step[:, 0])
    assert np.all(np.abs(recall_steps - share * np.arange(1, 101)) < 1)
    assert recall_steps[-1] == int(share * 100 + 1e-9)


def test_mixture_consumes_both_kinds_without_gaps(tokens: TokenFile) -> None:
    windows, recall = Windows(tokens, 48, 0), recall_stream(tokens)
    stream = TrainingStream(windows, [(0, recall)], recall_share=0.3, rows_per_step=4, steps=50)
    items = [stream[i] for i in range(len(stream))]
    text = [item for item in items if not is_recall(item)]
    asked = [item for item in items if is_recall(item)]
    assert len(asked) == 60
    assert len(text) == 140
    for k, item in enumerate(text):
        assert np.array_equal(item["input_ids"], windows[k][None])
        assert np.array_equal(item["labels"], windows[k][None])
    for k, item in enumerate(asked):
        assert np.array_equal(item["input_ids"], recall[k].input_ids[None])
        assert np.array_equal(item["labels"], recall[k].labels[None])


def test_mixture_by_random_access_equals_in_order(tokens: TokenFile) -> None:
    def fresh() -> TrainingStream:
        return TrainingStream(
            Windows(tokens, 48, 0), [(0, recall_stream(tokens))], recall_share=0.4,
            rows_per_step=4, steps=40,
        )  # fmt: skip

    in_order = [item["input_ids"] for item in map(fresh().__getitem__, range(160))]
    jumping = pickle.loads(pickle.dumps(fresh()))
    for index in np.random.default_rng(0).permutation(160).tolist():
        assert np.array_equal(jumping[index]["input_ids"], in_order[index])
    assert len({row.tobytes() for row in in_order}) == 160


def test_mixture_changing_a_label_changes_no_input(tokens: TokenFile) -> None:
    stream = TrainingStream(Windows(tokens, 48, 0), recall_share=0, rows_per_step=1, steps=1)
    item = stream[0]
    item["labels"][:] = -100
    assert (item["input_ids"] >= 0).all()


def test_mixture_bad_arguments(tokens: TokenFile) -> None:
    def make(
        seed: int | None = 0, share: float = 0.5, per_step: int = 2, steps: int = 5,
        with_recall: bool = True,
    ) -> TrainingStream:  # fmt: skip
        return TrainingStream(
            Windows(tokens, 48, seed),
            [(0, recall_stream(tokens))] if with_recall else [],
            recall_share=share,
            rows_per_step=per_step,
            steps=steps,
        )

    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match=r"^recall_share: "):
            make(share=share)
    with pytest.raises(UserError, match=r"^recall: "):
        make(with_recall=False)
    with pytest.raises(UserError, match=r"^rows_per_step: "):
        make(per_step=0)
    with pytest.raises(UserError, match=r"^steps: "):
        make(steps=0)
    with pytest.raises(UserError, match=r"^steps: .*without a seed"):
        make(seed=None, steps=100_000)
    assert len(make(share=0, with_recall=False)) == 10
    for index in (-1, 10):
        with pytest.raises(IndexError):
            make()[index]


def test_mixture_stages_follow_each_other_with_equal_tokens(tokens: TokenFile) -> None:
    def stage(length: int) -> RecallStream:
        spec = RecallSpec(length, 4, 2)
        return RecallStream(RecallTokens(len(TOKENIZER)), tokens, spec, 5, TOKENIZER.bos_token_id)

    short, whole = stage(24), stage(48)
    stream = TrainingStream(
        Windows(tokens, 48, 0), [(3, short), (5, whole)], recall_share=0.5,
        rows_per_step=2, steps=20,
    )  # fmt: skip
    assert {item["input_ids"].size for item in map(stream.__getitem__, range(40))} == {48}
    kinds = [stream.kind(step) for step in range(20)]
    assert kinds == ["text", "recall of 24 tokens"] * 3 + ["text", "recall of 48 tokens"] * 7
    asked = [stream[i]["input_ids"] for i in range(40) if is_recall(stream[i])]
    short_rows = np.concatenate(asked[:6])
    assert all(np.array_equal(row, short[k].input_ids) for k, row in enumerate(short_rows))
    assert all(np.array_equal(rows[0], whole[k].input_ids) for k, rows in enumerate(asked[6:]))
    with pytest.raises(UserError, match=r"^recall: sequences of 20 tokens do not fill"):
        TrainingStream(
            Windows(tokens, 48, 0), [(0, stage(20))], recall_share=0.5, rows_per_step=2, steps=2
        )
