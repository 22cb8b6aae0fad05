"""Training: order, groups, exact resume, checkpoints, monitor."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="training needs the extra hf")

from transformers import TrainingArguments

from diffattn.errors import UserError
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM
from diffattn.training import (
    DivergedError,
    Interrupted,
    SpikeMonitor,
    TrainConfig,
    latest_checkpoint,
    parameter_groups,
    read_metrics,
    train,
)
from diffattn.training.checkpoints import MARKER, is_complete, mark_complete
from diffattn.training.trainer import DiffTrainer

STEPS = 6


class Stream:
    """Random tokens, item i a function of i alone; remembers what was read."""

    def __init__(self, steps=STEPS, sequences=2, length=16):
        self.steps, self.sequences, self.length = steps, sequences, length
        self.read = []

    def __len__(self):
        return self.steps * self.sequences

    def __getitem__(self, index):
        self.read.append(index)
        ids = np.random.default_rng(index).integers(0, 50, (1, self.length))
        return {"input_ids": ids, "labels": ids}

    def kind(self, step):
        return "text"


def tiny_model(kind="v1", seed=0, dropout=0.0, **changes):
    torch.manual_seed(seed)
    return DiffTransformerForCausalLM(
        DiffTransformerConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            match_heads=4,
            attention=kind,
            attention_dropout=dropout,
            **changes,
        )
    )


def config(**changes):
    return TrainConfig(
        **{"steps": STEPS, "rows_per_step": 2, "learning_rate": 1e-2, "save_every": 2} | changes
    )


def stop_after(steps):
    calls = iter(range(1, 1000))
    return lambda: next(calls) >= steps


@pytest.mark.parametrize("kind", ["softmax", "v1", "v2"])
def test_three_steps_resume_three_steps_equals_six(tmp_path, kind):
    # dropout draws random numbers, so the state of the generator must be restored as well
    straight = tiny_model(kind, dropout=0.1)
    train(straight, Stream(), config(), tmp_path / "a")
    with pytest.raises(Interrupted, match="step 3 of 6"):
        train(
            tiny_model(kind, dropout=0.1),
            Stream(),
            config(),
            tmp_path / "b",
            should_stop=stop_after(3),
        )
    resumed = tiny_model(kind, seed=99, dropout=0.1)
    train(resumed, Stream(), config(), tmp_path / "b")
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)
    a, b = (read_metrics(tmp_path / run / "metrics.jsonl") for run in "ab")
    assert [line["step"] for line in b] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in a] == pytest.approx([line["loss"] for line in b], abs=1e-6)
    assert [line["tokens"] for line in b] == [32 * step for step in range(1, 7)]


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    with pytest.raises(Interrupted):
        train(tiny_model(), Stream(), config(), tmp_path, should_stop=stop_after(3))
    assert latest_checkpoint(tmp_path).name == "checkpoint-3"
    torn = tmp_path / "checkpoint-5"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path).name == "checkpoint-3"
    newest = tmp_path / "checkpoint-3"
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert latest_checkpoint(tmp_path).name == "checkpoint-2"
    train(tiny_model(), Stream(), config(), tmp_path)
    assert latest_checkpoint(tmp_path).name == "checkpoint-6"


def test_a_checkpoint_that_changed_at_equal_size_is_passed_over(tmp_path, caplog):
    with pytest.raises(Interrupted):
        train(tiny_model(), Stream(), config(), tmp_path, should_stop=stop_after(5))
    assert latest_checkpoint(tmp_path).name == "checkpoint-5"
    for damaged in (MARKER, "optimizer.pt"):
        path = tmp_path / "checkpoint-5" / damaged
        whole = path.read_bytes()
        path.write_bytes(whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:])
        caplog.clear()
        assert latest_checkpoint(tmp_path).name == "checkpoint-4"
        assert "checkpoint-5 is damaged" in caplog.text
        path.write_bytes(whole)
    assert latest_checkpoint(tmp_path).name == "checkpoint-5"
    (tmp_path / "checkpoint-5" / MARKER).unlink()  # never finished: nothing to tell
    caplog.clear()
    assert latest_checkpoint(tmp_path).name == "checkpoint-4"
    assert caplog.text == ""


def test_the_note_on_a_damaged_checkpoint_reaches_standard_error(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / MARKER).write_text('{"gone": ""}')
    code = f"from diffattn.training import latest_checkpoint; latest_checkpoint({tmp_path!r})"
    code = "from pathlib import PosixPath; " + code
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "checkpoint-1 is damaged" in told.stderr.splitlines()[-1]
    assert told.stdout == ""


def test_a_marker_vouches_for_every_file(tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "weights").write_bytes(b"12345")
    (folder / (MARKER + ".draft")).write_text("left by a kill")
    assert not is_complete(folder)
    mark_complete(folder)
    assert is_complete(folder)
    (folder / "weights").write_bytes(b"12344")
    assert not is_complete(folder)
    (folder / "weights").unlink()
    assert not is_complete(folder)
    (folder / MARKER).write_text("{")
    assert not is_complete(folder)


def test_data_is_read_in_order(tmp_path):
    stream = Stream()
    train(tiny_model(), stream, config(save_every=None), tmp_path)
    assert stream.read[-len(stream) :] == list(range(len(stream)))


@pytest.mark.parametrize("kind", ["softmax", "v1", "v2"])
def test_lambda_norms_and_biases_have_no_weight_decay(kind):
    model = tiny_model(kind)
    decayed, plain = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    expected = {
        name
        for name, parameter in model.named_parameters()
        if "lambda" in name or "norm" in name or "subln" in name
    }
    assert set(plain["names"]) == expected
    everything = {name for name, _ in model.named_parameters()}
    assert set(decayed["names"]) == everything - expected


def test_no_checkpoint_holds_a_pickled_model(tmp_path):
    train(tiny_model(), Stream(), config(), tmp_path)
    names = {path.name for path in latest_checkpoint(tmp_path).iterdir()}
    assert "model.safetensors" in names
    assert not any(name.endswith(".bin") for name in names)


def test_nan_stops_training_with_one_line(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(DivergedError, match=r"loss is nan at step 1; expected a finite number"):
        train(model, Stream(), config(), tmp_path)


class State:
    def __init__(self, step):
        self.global_step = step


class Args:
    learning_rate = 1.0
    max_grad_norm = 1.0


def feed(monitor, losses, norms=None):
    for step, loss in enumerate(losses, start=1):
        logs = {"loss": loss} if norms is None else {"loss": loss, "grad_norm": norms[step - 1]}
        monitor.on_log(Args(), State(step), None, logs=logs)
    return monitor.warnings


def test_monitor_reports_a_spike_and_nothing_else():
    rng = np.random.default_rng(0)
    calm = list(5 - 0.02 * np.arange(60) + 0.05 * rng.normal(size=60))
    assert feed(SpikeMonitor(), calm, [1.0] * 60) == []
    spiked = [*calm[:40], 9.0, *calm[40:]]
    assert len(feed(SpikeMonitor(), spiked)) == 1
    warnings = feed(SpikeMonitor(), calm, [1.0] * 50 + [30.0] + [1.0] * 9)
    assert len(warnings) == 1
    assert "grad_norm spike at step 51" in warnings[0]


def test_monitor_keeps_kinds_apart():
    alternating = [5.0 if step % 2 else 1.0 for step in range(80)]

    def kind_of(step):
        return "even" if step % 2 == 0 else "odd"

    assert feed(SpikeMonitor(kind_of=kind_of), alternating) == []
    assert feed(SpikeMonitor(kind_of=kind_of), [*alternating, 5.0]) != []


class Periodic(Stream):
    """Learnable tokens: each is three more than the one before."""

    def __getitem__(self, index):
        start = np.random.default_rng(index).integers(0, 50)
        ids = (start + 3 * np.arange(32))[None] % 50
        return {"input_ids": ids, "labels": ids.copy()}


@pytest.mark.parametrize(("learning_rate", "spikes"), [(1e-2, False), (1e-1, True)])
def test_ten_times_the_learning_rate_is_noticed(tmp_path, learning_rate, spikes):
    settings = config(
        steps=120, rows_per_step=4, save_every=None, learning_rate=learning_rate, warmup_share=0.05
    )
    model = tiny_model("v1", initializer_range=0.02, scale_embeddings=False)
    warnings = train(model, Periodic(120, 4), settings, tmp_path)
    assert any("spike" in warning for warning in warnings) == spikes


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({"fsdp": True}, {}),
        ({"fsdp": "full_shard"}, {}),
        ({}, {"ACCELERATE_USE_FSDP": "true"}),
    ],
)
def test_fsdp_on_a_cpu_is_refused(tmp_path, monkeypatch, options, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", **options
    )
    with pytest.raises(UserError, match=r"fsdp: expected an accelerator, got a CPU.*DDP") as caught:
        DiffTrainer(model=tiny_model(), args=arguments)
    assert "DistributedConfig(fsdp_size=...)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the trap is of CPUs alone")
def test_processes_that_would_train_by_themselves_are_refused(tmp_path, monkeypatch):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    assert arguments.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="use_cpu: expected True for 2 processes on CPUs"):
        DiffTrainer(model=tiny_model(), args=arguments)


def test_measurements_stand_in_the_metrics_file(tmp_path):
    train(
        tiny_model(),
        Stream(),
        config(save_every=None, measure_every=4),
        tmp_path,
        measure=lambda model: 1.25,
    )
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "heldout_loss" in line] == [4, 6]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_a_torn_line_ends_the_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate: expected more than 0"),
        ({"warmup_share": 1.5}, "warmup_share: expected a share of 0 to 1, got 1.5"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(UserError, match=message):
        config(**changes)


def test_warnings_outlive_a_resume(tmp_path):
    model = tiny_model("v1", initializer_range=0.02, scale_embeddings=False)
    settings = config(
        steps=120, rows_per_step=4, save_every=None, learning_rate=1e-1, warmup_share=0.05
    )
    straight = train(model, Periodic(120, 4), settings, tmp_path / "a")
    fresh = [tiny_model("v1", initializer_range=0.02, scale_embeddings=False) for _ in range(2)]
    with pytest.raises(Interrupted):
        train(fresh[0], Periodic(120, 4), settings, tmp_path / "b", should_stop=stop_after(110))
    resumed = train(fresh[1], Periodic(120, 4), settings, tmp_path / "b")
    before = [warning for warning in straight if int(warning.split()[4][:-1]) <= 110]
    assert before
    assert resumed[: len(before)] == before
