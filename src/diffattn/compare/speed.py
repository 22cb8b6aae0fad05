"""Training speed of the arms, measured once for each seed."""

import json
from pathlib import Path

import numpy as np
import torch

from diffattn.compare.corpus import Corpus
from diffattn.compare.plan import ComparePlan, said_plainly
from diffattn.compare.run import started_model
from diffattn.data import Windows
from diffattn.evaluation import training_rates
from diffattn.whole_file import write_json

Rates = list[dict[str, float]]


def read_rates(plan: ComparePlan, path: Path) -> Rates:
    """Tokens per second of every arm for each seed measured so far, at most the plan's seeds.

    A file that is missing, damaged or of other arms counts as not measured.
    """
    names = {arm.name for arm in plan.arms}
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))
        whole = all(
            set(of_seed) == names and all(float(rate) > 0 for rate in of_seed.values())
            for of_seed in rates
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return []
    return rates[: plan.seeds] if whole else []


def measure_rates(plan: ComparePlan, corpus: Corpus, path: Path) -> None:
    """Measure the seeds that are not measured yet: the median of rounds, on training text.

    Args:
        plan: the comparison.
        corpus: its text.
        path: file that keeps the rates.
    """
    preset, rates = plan.preset, read_rates(plan, path)
    windows = Windows(corpus.train, preset.length, seed=0)
    ids = torch.as_tensor(np.stack([windows[index] for index in range(preset.rows_per_step)]))
    for seed in range(len(rates), plan.seeds):
        models = [started_model(plan, arm, seed, corpus) for arm in plan.arms]
        medians = np.median(training_rates(models, ids, rounds=preset.speed_rounds), axis=1)
        rates.append({arm.name: float(rate) for arm, rate in zip(plan.arms, medians, strict=True)})
        with said_plainly(path):
            write_json(path, rates)


def rates_by_arm(plan: ComparePlan, rates: Rates) -> dict[str, np.ndarray]:
    """Rates as values [seeds, 1] of each arm."""
    return {arm.name: np.array([[of_seed[arm.name]] for of_seed in rates]) for arm in plan.arms}
