"""Where a checkpoint may be written, and what stays when it is not."""

import os
import signal
import threading

import folders
import pytest

from diffattn.models.convert import folder as writing
from diffattn.models.new_folder import UNFINISHED


@pytest.fixture
def source(tmp_path):
    return folders.ours(tmp_path / "in")


def into(source, target):
    return folders.convert(source, target, "--to", "diffllama")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("file", "expected a new or empty folder, got file"),
        ("file/x", "is a file"),
        ("file/x/y", "is a file"),
        ("loop", "expected a new or empty folder, got loop"),
        ("x" * 300, "File name too long"),
        (".", "expected a folder other than the working folder, got ."),
        ("new/..", "expected a folder other than the working folder, got new/.."),
    ],
)
def test_a_place_for_no_folder(target, reason, source, tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    if "." not in target:
        (place / "file").write_text("")
        (place / "loop").symlink_to("loop")
    before = sorted(os.listdir(place))
    code, said = into(source, target)
    assert code == 2
    assert "convert: out: " in said
    assert reason in said
    assert sorted(os.listdir(place)) == before


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_names_is_written(there, source, tmp_path):
    if there:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert into(source, tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()


def test_another_process_was_first(source, tmp_path, monkeypatch):
    def slow(*args, **options):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("")
        save(*args, **options)

    save = writing.save_file
    monkeypatch.setattr(writing, "save_file", slow)
    code, said = into(source, tmp_path / "out")
    assert code == 2
    assert f"out: {tmp_path / 'out'} cannot be written" in said
    assert os.listdir(tmp_path / "out") == ["theirs"]
    assert not list(tmp_path.glob(".out*"))


def test_sigterm_leaves_nothing(source, tmp_path, monkeypatch):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("a signal would end the test run")
    before = signal.getsignal(signal.SIGTERM)

    def stopped(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(writing, "save_file", stopped)
    with pytest.raises(SystemExit, match="143"):
        into(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_finished_folder_holds_no_marker_and_files_of_the_tokenizer(source, tmp_path):
    (source / "tokenizer").mkdir()
    (source / "tokenizer.json").write_text("{}")
    assert into(source, tmp_path / "out")[0] == 0
    held = set(os.listdir(tmp_path / "out"))
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= held
    assert not held & {"tokenizer", UNFINISHED}
