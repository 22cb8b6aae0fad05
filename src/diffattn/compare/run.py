"""One training run of a comparison, from starting weights to measured results."""

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from diffattn.compare.arms import Arm
from diffattn.compare.corpus import Corpus, open_corpus
from diffattn.compare.plan import ComparePlan, said_plainly
from diffattn.compare.start import draw_start
from diffattn.data import RecallItem, RecallSpec, RecallStream, TrainingStream, Windows, recall_grid
from diffattn.evaluation import attention_shares, lam_by_layer, recall_outcomes, window_losses
from diffattn.locks import held
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM
from diffattn.models.fused import use_fused
from diffattn.training import DivergedError, TrainConfig, read_metrics, train
from diffattn.whole_file import write_json

# the held-out items are the same in every seed, so that arms and seeds pair item by item
ITEM_SEED = 20_240_917
TOKENS_PER_BATCH = 4096
RESULT_FIELDS = {
    *("arm", "seed", "warnings", "train_seconds", "train_tokens", "curve", "window_losses"),
    *("heldout_loss", "lam", "recall_items", "attention_items", "peak_memory_bytes"),
}


def build_model(plan: ComparePlan, arm: Arm, corpus: Corpus) -> DiffTransformerForCausalLM:
    """The arm's model with weights not yet drawn."""
    preset = plan.preset
    return DiffTransformerForCausalLM(
        DiffTransformerConfig(
            vocab_size=corpus.model_vocabulary(plan),
            hidden_size=preset.hidden_size,
            num_hidden_layers=preset.num_hidden_layers,
            attention=arm.attention,
            match_heads=preset.match_heads // arm.head_divisor,
            max_position_embeddings=max(preset.length, *preset.recall_lengths),
            bos_token_id=corpus.train.bos_id,
            eos_token_id=corpus.train.eos_id,
        )
    )


def started_model(
    plan: ComparePlan, arm: Arm, seed: int, corpus: Corpus
) -> DiffTransformerForCausalLM:
    """The arm's model with the starting weights of a seed, on the best device."""
    model = build_model(plan, arm, corpus)
    # an arm that is named twice starts elsewhere the second time, so that it shows the noise
    draw_start(model, seed + 1_000_003 * (plan.arms.index(arm) if arm.own_start else 0))
    nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    use_fused(model)  # every arm attends by the same kernel
    return model


def execute_run(
    plan: ComparePlan,
    arm: Arm,
    seed: int,
    *,
    data: Path,
    folder: Path,
    on_progress: Callable[[int, int, float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Train and measure one arm with one seed; a finished run is read, not repeated.

    Args:
        plan: the comparison.
        arm: the architecture.
        seed: of starting weights and data order.
        data: folder of the prepared text.
        folder: gets `metrics.jsonl`, checkpoints while training, `model/` and `result.json`.
        on_progress: called after each step with step, steps and seconds.
        should_stop: asked after each step; True saves a checkpoint and stops.

    Returns:
        The result record.

    Raises:
        Interrupted: `should_stop` asked for it.
        UserError: training diverged, or the folder cannot be written.
    """
    with said_plainly(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / ".lock", wait=True):  # against what a killed command left over
            finished = read_result(folder)
            if finished is not None:
                return finished
            corpus = open_corpus(data)
            model = started_model(plan, arm, seed, corpus)
            windows = Windows(corpus.heldout, plan.preset.length, seed=ITEM_SEED)
            try:
                warnings = train(
                    model,
                    _stream(plan, seed, corpus),
                    _train_config(plan, arm, seed),
                    folder,
                    measure=_curve_measure(plan, windows),
                    on_progress=on_progress,
                    should_stop=should_stop,
                )
            except DivergedError as error:
                raise DivergedError(f"{arm.label}, seed {seed}: {error}") from error
            result = {
                "arm": arm.name,
                "seed": seed,
                "warnings": warnings,
                **_curve(plan, folder),
                **_measure(plan, model, corpus, windows),
                "peak_memory_bytes": peak_memory_bytes(),
            }
            model.save_pretrained(folder / "model")
            corpus.tokenizer.save_pretrained(folder / "model")
            write_json(folder / "result.json", result)
            _remove_checkpoints(folder)
            return result


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run, or None; a damaged file counts as not finished."""
    try:
        record = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and set(record) >= RESULT_FIELDS else None


def check_text(plan: ComparePlan, corpus: Corpus) -> None:
    """Refuse a text that some step of training or measuring would find too short.

    Raises:
        UserError: the training or held-out text is too short; in seconds, not after training.
    """
    _stream(plan, 0, corpus)
    Windows(corpus.heldout, plan.preset.length, seed=ITEM_SEED)
    if plan.preset.recall_share > 0:
        evaluation_items(plan, corpus)


def evaluation_items(plan: ComparePlan, corpus: Corpus) -> list[RecallItem]:
    """The held-out recall sequences, the same in every arm and seed."""
    preset = plan.preset
    return recall_grid(
        corpus.recall_tokens(plan),
        corpus.heldout,
        lengths=preset.recall_lengths,
        cells=preset.recall_cells,
        depths=preset.recall_depths,
        samples=preset.recall_samples,
        seed=ITEM_SEED,
        bos_id=corpus.bos_id,
    )


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _stream(plan: ComparePlan, seed: int, corpus: Corpus) -> TrainingStream:
    preset, steps = plan.preset, plan.training_steps
    stages = []
    if preset.recall_share > 0:
        for number, length in plan.recall_stages:
            spec = RecallSpec(length, preset.recall_needles, preset.recall_queries)
            tokens = corpus.recall_tokens(plan)
            stages.append((number, RecallStream(tokens, corpus.train, spec, seed, corpus.bos_id)))
    return TrainingStream(
        Windows(corpus.train, preset.length, seed=seed),
        stages,
        recall_share=preset.recall_share,
        rows_per_step=preset.rows_per_step,
        steps=steps,
    )


def _train_config(plan: ComparePlan, arm: Arm, seed: int) -> TrainConfig:
    preset, steps = plan.preset, plan.training_steps
    return TrainConfig(
        steps=steps,
        rows_per_step=preset.rows_per_step,
        learning_rate=preset.learning_rate * arm.lr_factor,
        seed=seed,
        log_every=1 if not torch.cuda.is_available() else 10,
        measure_every=max(1, steps // preset.curve_points),
        save_every=preset.save_every,
        bf16=preset.bf16,
    )


def _curve_measure(plan: ComparePlan, windows: Windows) -> Callable[[nn.Module], float]:
    few = [windows[index] for index in range(min(plan.preset.curve_windows, len(windows)))]

    def measure(model: nn.Module) -> float:
        return float(window_losses(model, few, batch_size=_batch(plan)).mean())

    return measure


def _batch(plan: ComparePlan) -> int:
    return max(1, TOKENS_PER_BATCH // plan.preset.length)


def _curve(plan: ComparePlan, folder: Path) -> dict[str, Any]:
    """Training time, and the curve thinned to its measured points."""
    lines = read_metrics(folder / "metrics.jsonl")
    curve, losses = [], []
    for line in lines:
        losses.append(line["loss"])
        if "heldout_loss" in line:
            curve.append(
                {
                    "step": line["step"],
                    "tokens": line["tokens"],
                    "seconds": line["seconds"],
                    "train_loss": float(np.mean(losses)),
                    "heldout_loss": line["heldout_loss"],
                    "grad_norm": line["grad_norm"],
                }
            )
            losses = []
    return {
        "train_seconds": lines[-1]["seconds"],
        "train_tokens": lines[-1]["tokens"],
        "curve": curve,
    }


def _measure(
    plan: ComparePlan, model: DiffTransformerForCausalLM, corpus: Corpus, windows: Windows
) -> dict[str, Any]:
    """Everything that is measured on the trained model, item by item."""
    preset = plan.preset
    heldout = [windows[index] for index in range(min(preset.heldout_windows, len(windows)))]
    started = time.perf_counter()
    losses = window_losses(model, heldout, batch_size=_batch(plan))
    measured: dict[str, Any] = {
        "window_losses": losses.tolist(),
        "heldout_loss": float(losses.mean()),
        "lam": lam_by_layer(model, torch.as_tensor(np.stack(heldout[: _batch(plan)]))),
        "recall_items": [],
        "attention_items": [],
    }
    if preset.recall_share > 0:
        items = evaluation_items(plan, corpus)
        outcomes = recall_outcomes(model, items, tokens_per_batch=TOKENS_PER_BATCH)
        measured["recall_items"] = [
            {**_cell(item), "accuracy": outcome.accuracy, "swap": outcome.swap}
            for item, outcome in zip(items, outcomes, strict=True)
        ]
        mapped = [item for item in items if _is_mapped(plan, item)]
        shares = attention_shares(model, mapped, tokens_per_batch=TOKENS_PER_BATCH)
        measured["attention_items"] = [
            {**_cell(item), "answer": share.answer, "noise": share.noise, "first": share.first}
            for item, share in zip(mapped, shares, strict=True)
        ]
    measured["evaluation_seconds"] = time.perf_counter() - started
    return measured


def _cell(item: RecallItem) -> dict[str, Any]:
    return {
        "length": item.length,
        "needles": item.needles,
        "queries": item.queries,
        "depth": item.depth,
    }


def _is_mapped(plan: ComparePlan, item: RecallItem) -> bool:
    """Attention is read where sequences are as long as in training and needles are most."""
    most = max(needles for needles, _ in plan.preset.recall_cells)
    return item.length == min(plan.preset.recall_lengths) and item.needles == most


def _remove_checkpoints(folder: Path) -> None:
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
