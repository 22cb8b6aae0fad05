"""`diffattn bench model`: training and decoding of the Transformer, V1 and V2."""

import json

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffattn.bench import model
from diffattn.cli import main
from diffattn.models.fused import NAME as FUSED

TINY = ("--width", "32", "--layers", "1", "--heads", "4", "--vocabulary", "50", "--seconds", "0.01")
TASKS = ("--training", "2x16", "--decoding", "24")


def command(out, *more):
    return ["bench", "model", *TINY, *TASKS, "--out", str(out), *more]


def test_both_tasks_of_all_models(tmp_path, capsys):
    assert main(command(tmp_path / "out", "--impl", "sdpa")) == 0
    records = json.loads((tmp_path / "out" / "results.json").read_text())["records"]
    assert list(records) == ["training 2x16", "decoding behind 24"]
    for record in records.values():
        assert set(record["seconds"]) == {f"{kind}, sdpa" for kind in ("Transformer", "V1", "V2")}
        assert record["errors"]["Transformer, sdpa"] == 1.0
    assert "decoding behind 24 tokens" in capsys.readouterr().out


def test_speeds_are_ratios_of_tokens_per_second_to_both_bases():
    times = {"Transformer, sdpa": [1.0, 1.0], "Transformer, x": [0.5, 0.5], "V1, x": [0.25, 0.25]}
    to_sdpa, to_own = model.speeds({"seconds": times})["V1, x"]
    assert (to_sdpa.middle, to_own.middle) == (4.0, 2.0)


@pytest.fixture
def registered():
    """Registers an attention implementation as one of this package's."""
    added = []

    def register(name, change):
        real = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attend(*args, **kwargs):
            heads, maps = real(*args, **kwargs)
            return change(heads), maps

        attend.__module__ = "diffattn.somewhere"
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        added.append(name)

    yield register
    for name in added:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name)


def test_a_wrong_attention_is_refused_and_all_means_what_the_package_adds(
    registered, tmp_path, capsys
):
    registered("planted", lambda heads: 1.02 * heads)
    assert model.implementations(("all",)) == ("sdpa", FUSED, "planted")
    assert main(command(tmp_path / "out")) == 1
    records = json.loads((tmp_path / "out" / "results.json").read_text())["records"]
    for record in records.values():
        assert {name for name in record["wrong"] if name.endswith("planted")}
        assert not any(name in record["seconds"] for name in record["wrong"])
    assert "Transformer, planted is wrong" in capsys.readouterr().err


def test_decoding_leaves_the_cache_as_long_as_it_was(monkeypatch):
    caches = []

    class Kept(model.DynamicCache):
        def __init__(self, **options):
            super().__init__(**options)
            caches.append(self)

    monkeypatch.setattr(model, "DynamicCache", Kept)
    settings = model.Settings(width=32, layers=1, heads=4, vocabulary=50)
    step = model._decoding(model._model(settings, "v1", "sdpa"), torch.randint(50, (1, 24)))
    for _ in range(3):
        step()
    assert [cache.get_seq_length() for cache in caches] == [24]


def test_bad_input(tmp_path, capsys):
    for options, expected in (
        (("--training", "4"), "training: expected ROWSxTOKENS, whole numbers above 0, got '4'"),
        (("--decoding", "0"), "decoding: expected a number above 0, got 0"),
        (("--impl", "flash"), "impl: expected one of eager"),
        (("--heads", "3"), "model: match_heads: 3 does not divide hidden_size = 32"),
    ):
        assert main(command(tmp_path / "out", *options)) == 2
        assert expected in capsys.readouterr().err
