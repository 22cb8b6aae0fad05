"""Which files of a folder are read, and which folders are refused."""

import json
import shutil

import folders
import pytest

from diffattn.models.convert import folder as writing

INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path):
    return folders.ours(tmp_path / "in")


def refused(source, *words):
    code, said = folders.convert(source, source.parent / "out", "--to", "diffllama", *words)
    assert not (source.parent / "out").exists()
    assert code == 2
    return said


def test_beside_the_weights_other_tensors_are_not_read(source, tmp_path):
    stale = folders.ours(tmp_path / "stale", lambda_start=0.3)
    shutil.copy(stale / "model.safetensors", source / "zzz_stale.safetensors")
    (source / "broken.safetensors").write_bytes(b"")
    assert folders.convert(source, tmp_path / "out", "--to", "diffllama")[0] == 0


def test_a_tensor_in_two_files_is_refused(source):
    shutil.copy(source / "model.safetensors", source / "b.safetensors")
    (source / "model.safetensors").rename(source / "a.safetensors")
    assert "expected each tensor once, got model." in refused(source)


def test_only_listed_shards_are_read(source, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 1000)
    assert folders.convert(source, tmp_path / "shards", "--to", "diffllama")[0] == 0
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    shutil.copy(source / "model.safetensors", tmp_path / "shards" / "stale.safetensors")
    assert folders.convert(tmp_path / "shards", tmp_path / "back")[0] == 0
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    assert "a shard is missing" in refused(tmp_path / "shards", "--to", "diffattn")
    shutil.copy(source / "model.safetensors", tmp_path / "shards")
    assert "got both in" in refused(tmp_path / "shards", "--to", "diffattn")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", f"{INDEX} is not JSON"),
        ("[" * 100_000, f"{INDEX} is not JSON"),
        ("[]", f"expected an object in {INDEX}"),
        (json.dumps({}), f"{INDEX}: expected names of files in weight_map"),
        (json.dumps({"weight_map": 5}), f"{INDEX}: expected names of files in weight_map"),
        (json.dumps({"weight_map": None}), f"{INDEX}: expected names of files in weight_map"),
        (json.dumps({"weight_map": {"x": 5}}), f"{INDEX}: expected names of files in weight_map"),
        (json.dumps({"weight_map": {"x": "model.safetensors"}}), "x is listed and not there"),
    ],
    ids=range(8),
)
def test_an_index_that_lists_nothing(source, text, reason):
    (source / INDEX).write_text(text)
    assert f"in: {reason}" in refused(source).replace("a shard is missing; ", "")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX])
def test_a_folder_in_place_of_a_file(source, name):
    (source / name).unlink(missing_ok=True)
    (source / name).mkdir()
    assert f"in: {name} cannot be read" in refused(source)


def test_what_a_killed_conversion_left_is_refused(source, tmp_path, monkeypatch):
    def killed(*args, **options):
        save(*args, **options)
        raise KeyboardInterrupt

    save = writing.save_file
    with monkeypatch.context() as patched:
        patched.setattr(writing, "save_file", killed)
        patched.setattr(writing.shutil, "rmtree", lambda *a, **k: None)  # as after kill -9
        from diffattn.cli import main

        assert main(["convert", str(source), str(tmp_path / "x"), "--to", "diffllama"]) == 130
    (draft,) = tmp_path.glob(".x.*")
    for path in (draft, draft / "model.safetensors"):
        code, said = folders.convert(path, tmp_path / "out")
        assert (code, "is what a stopped conversion left" in said) == (2, True)
