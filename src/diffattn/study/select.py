"""Choose the heads of a pretrained model on some text: `diffattn dex select`."""

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffattn.data import Windows
from diffattn.dex import HeadPlan, select_heads
from diffattn.dex.base import load_base
from diffattn.dex.plan import draw
from diffattn.errors import MissingExtraError, UserError
from diffattn.study.base import base_folder, check_positions
from diffattn.study.text import prepare_text


def select(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    data: str | None = None,
    criterion: Any = "entropy",
    count: int | None = None,
    sequences: int = 64,
    length: int = 1024,
    skip: int = 32,
    first_key: bool = True,
    say: Callable[[str], None] = print,
) -> HeadPlan:
    """Score heads over windows of training text; write the plan and a picture of it.

    Args:
        model: folder of the model.
        out: the plan, as JSON; a PNG of the same name is put beside it.
        data: text; None means the bundled speeches.
        criterion: as in `diffattn.dex.select_heads`.
        count: heads of each layer; None means half.
        sequences: windows of text.
        length: tokens of a window.
        skip: first positions that do not count.
        first_key: whether the first key counts.
        say: gets progress.

    Returns:
        The plan.

    Raises:
        UserError: the model or the text is not what it should be.
    """
    target = Path(out)
    if target.suffix == ".png" or target.is_dir():
        raise UserError(f"out: expected a JSON file, got {target}; its picture lies beside it")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder, started = base_folder(model), time.monotonic()
    base = load_base(folder)
    check_positions(base, length=length)
    with tempfile.TemporaryDirectory() as scratch:
        text = prepare_text(data, folder, Path(scratch))
        windows = Windows(text.train, length, seed=0)
        total = min(sequences, len(windows))

        def on_progress(done: int) -> None:
            if done == total or done % 8 == 0:
                say(f"{done} of {total} windows, {time.monotonic() - started:.0f} s")

        plan = select_heads(
            base,
            (torch.as_tensor(windows[n])[None] for n in range(total)),
            criterion=criterion,
            count=count,
            skip=skip,
            first_key=first_key,
            on_progress=on_progress,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(f"peak memory {peak:.2f} GiB")
    plan.save(target)
    try:
        draw(plan, target.with_suffix(".png"))
    except MissingExtraError as error:
        say(f"no picture: {error}")
    return plan
