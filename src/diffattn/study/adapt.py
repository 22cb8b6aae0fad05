"""Train one adapter: `diffattn dex adapt`."""

import functools
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffattn.data import TextStream, TokenFile, Windows
from diffattn.dex import DexCallback, DexConfig, HeadPlan, inject, save
from diffattn.dex.base import load_base
from diffattn.errors import UserError
from diffattn.evaluation import item_losses, paired_interval
from diffattn.folder import begun, check_same, read_json
from diffattn.locks import held
from diffattn.signals import stop_requests
from diffattn.study.base import base_folder, check_positions, digests
from diffattn.study.heads import chosen_plan
from diffattn.study.text import Text, prepare_text
from diffattn.study.training import train_adaptation
from diffattn.training.adaptation import DexTrainer
from diffattn.whole_file import write_json

Say = Callable[[str], None]
RESULT = "adapt.json"


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """What an adaptation is made of.

    Args:
        model: folder of the base model.
        data: text to adapt to; None means the bundled speeches.
        steps: optimizer steps.
        length: tokens of a window.
        rows: windows of one optimizer step.
        learning_rate: peak, after 3 % warm-up, of a cosine to zero.
        lam_rate: the learning rate of lam as a multiple of it.
        ramp_steps: T of the schedule; None means half the steps.
        heads: "entropy", "importance", "all", or the path of a plan.
        bf16: compute under bf16 autocast; weights stay fp32.
        heldout_windows: windows of held-out text that are measured before and after.
        seed: of the order of the text.
    """

    model: str
    data: str | None = None
    steps: int
    length: int = 1024
    rows: int = 1
    learning_rate: float = 1e-4
    lam_rate: float = 10.0
    ramp_steps: int | None = None
    heads: str = "entropy"
    bf16: bool = False
    heldout_windows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "heldout_windows"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.lam_rate < math.inf:
            raise UserError(f"lam_rate: expected a number above 0, got {self.lam_rate}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed: expected 0 to 2^32 - 1, got {self.seed}")


def adapt(
    settings: AdaptSettings,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    say: Say = print,
) -> dict[str, Any]:
    """Adapt a model with DEX and say what became of its held-out loss.

    Args:
        settings: of the adaptation.
        out: folder that gets `dex_config.json`, `dex_model.safetensors`, `plan.json`,
            `adapt.json` and, under `run/`, metrics and checkpoints.
        resume: go on with what the folder holds.
        say: gets one line for each step of the work.

    Returns:
        The content of `adapt.json`: held-out loss before and after in nats per token, their
        difference with its 95 % interval over windows.

    Raises:
        UserError: bad settings, model or text; or the folder holds something else.
        Interrupted: Ctrl-C; a checkpoint was saved.
    """
    folder, base = Path(out), base_folder(settings.model)
    model = load_base(base)
    check_positions(model, length=settings.length)
    with begun(folder, asdict(settings), resume=resume, what="adaptation"):
        text = prepare_text(settings.data, base, folder / "tokens")
        check_same(folder / "inputs.json", {"data": text.digest, **digests(base)}, folder)
        heldout = _heldout(text.heldout, settings)
        stream = TextStream(
            Windows(text.train, settings.length, seed=settings.seed),
            rows_per_step=settings.rows,
            steps=settings.steps,
        )
        if (folder / RESULT).exists():
            return _finished(folder, say)
        plan = _plan(model, text, settings, folder, say)
    with held(folder / ".lock", wait=False) as mine:
        if not mine:
            raise UserError(f"out: another process works on {folder}")
        return _adapt(model, plan, heldout, stream, settings, folder, say)


def _adapt(
    model: Any,
    plan: HeadPlan,
    heldout: list[dict[str, np.ndarray]],
    stream: TextStream,
    settings: AdaptSettings,
    folder: Path,
    say: Say,
) -> dict[str, Any]:
    say(f"measuring the base model on {len(heldout)} held-out windows")
    before = _measured(folder / "base_losses.json", lambda: item_losses(model, heldout))
    ramp = settings.steps // 2 if settings.ramp_steps is None else settings.ramp_steps
    inject(model, DexConfig(heads=plan.heads, ramp_steps=ramp))
    with stop_requests() as asked:
        train_adaptation(
            model,
            stream,
            folder / "run",
            rows=settings.rows,
            learning_rate=settings.learning_rate,
            seed=settings.seed,
            bf16=settings.bf16,
            keep=True,
            trainer=functools.partial(DexTrainer, lam_rate=settings.lam_rate),
            callbacks=[DexCallback()],
            say=say,
            should_stop=asked,
        )
    save(model, folder)
    after = item_losses(model, heldout)
    if not np.isfinite(after).all():
        raise UserError(
            f"learning_rate: {settings.learning_rate:g} left a model without a finite loss; the "
            "adapter is not good for anything, try a lower one in another folder"
        )
    result = {"settings": asdict(settings), **_change(before, after)}
    write_json(folder / RESULT, result)
    for checkpoint in (folder / "run").glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
    return _told(result, say)


def _finished(folder: Path, say: Say) -> dict[str, Any]:
    say(f"{folder} is finished")
    return _told(read_json(folder / RESULT), say)


def _told(result: dict[str, Any], say: Say) -> dict[str, Any]:
    low, high = result["interval"]
    say(
        f"held-out loss {result['before']:.4f} -> {result['after']:.4f} nats per token, "
        f"difference {result['difference']:+.4f}, 95 % interval over {result['windows']} windows "
        f"{low:+.4f} to {high:+.4f}"
    )
    say("tuning attention alone may gain as much: diffattn dex study tells")
    return result


def _heldout(tokens: TokenFile, settings: AdaptSettings) -> list[dict[str, np.ndarray]]:
    windows = Windows(tokens, settings.length, seed=0)
    count = min(settings.heldout_windows, len(windows))
    if count < 2:
        raise UserError(
            f"length: held-out text has {tokens.tokens:,} tokens, fewer than two windows of "
            f"{settings.length:,}; use more text or shorter windows"
        )
    stream = TextStream(windows, rows_per_step=1, steps=count)
    return [stream[index] for index in range(count)]


def _plan(model: Any, text: Text, settings: AdaptSettings, folder: Path, say: Say) -> HeadPlan:
    path = folder / "plan.json"
    heads = str(path) if path.exists() else settings.heads
    plan = chosen_plan(model, text.train, heads, settings.length, settings.seed, say)
    plan.save(path)
    return plan


def _measured(path: Path, measure: Callable[[], np.ndarray]) -> np.ndarray:
    if path.exists():
        return np.array(read_json(path, list))
    losses = measure()
    write_json(path, losses.tolist())
    return losses


def _change(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    change = after - before
    return {
        "before": before.mean(),
        "after": after.mean(),
        "difference": change.mean(),
        "interval": list(paired_interval(change)),
        "windows": len(change),
    }
