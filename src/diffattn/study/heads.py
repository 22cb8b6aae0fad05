"""The heads that an adaptation extends: chosen on its text, or read from a plan."""

from collections.abc import Callable
from typing import Any

import torch

from diffattn.data import TokenFile, Windows
from diffattn.dex import HeadPlan, select_heads
from diffattn.dex.adapter import fingerprint

SELECTION_SEQUENCES = 64
CRITERIA = ("entropy", "importance", "all")


def chosen_plan(
    model: Any, tokens: TokenFile, heads: str, length: int, seed: int, say: Callable[[str], None]
) -> HeadPlan:
    """The plan by a criterion, over windows of training text, or the one in a file.

    Args:
        model: the base model.
        tokens: training text.
        heads: "entropy", "importance", "all", or the path of a plan.
        length: tokens of a window.
        seed: of the order of windows.
        say: gets a line before long work.

    Raises:
        UserError: the file is no plan, or one of another architecture.
    """
    if heads not in CRITERIA:
        plan = HeadPlan.read(heads)
    else:
        windows = Windows(tokens, length, seed=seed)
        count = min(SELECTION_SEQUENCES, len(windows))
        say(f"selecting heads by {heads} over {count} windows")
        sequences = (torch.as_tensor(windows[n])[None] for n in range(count))
        chosen: Any = heads

        def on_progress(done: int) -> None:
            if done % 8 == 0 or done == count:
                say(f"{done} of {count} windows")

        plan = select_heads(model, sequences, criterion=chosen, on_progress=on_progress)
    plan.check(fingerprint(model))
    return plan
