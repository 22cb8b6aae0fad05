"""Results of all runs in one record: values, differences, intervals, verdicts."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from diffattn.compare.arms import Arm
from diffattn.compare.corpus import Corpus
from diffattn.compare.plan import ComparePlan
from diffattn.compare.run import build_model
from diffattn.evaluation import compare_to_first
from diffattn.evaluation.intervals import ONE_SEED
from diffattn.models.flops import training_flops_per_token
from diffattn.report.numbers import plural

LEVEL = 0.95
Run = dict[str, Any]
Values = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity in which arms are compared."""

    name: str
    label: str
    unit: str
    better: Literal["lower", "higher"]

    def record(self) -> dict[str, str]:
        """For the results file."""
        return {
            "name": self.name,
            "label": self.label,
            "unit": self.unit,
            "better": self.better,
        }


def collect_results(
    plan: ComparePlan,
    corpus: Corpus,
    runs: dict[str, list[Run]],
    rates: Values,
    looks: Sequence[int] = (),
) -> dict[str, Any]:
    """The part of the results file that follows from the runs.

    Args:
        plan: the comparison.
        corpus: its text.
        runs: for each arm the result records, by seed.
        rates: for each arm tokens per second [seeds, 1].
        looks: numbers of seeds whose results were seen before more were added.

    Returns:
        The record, without machine and wall time.
    """
    measured = _measured(plan, runs, rates)
    comparisons = len(measured) * (len(plan.arms) - 1)
    degrees = (len(plan.arms) - 1) * (plan.seeds - 1)
    notes = _notes(plan, runs, measured, looks)
    return {
        "schema": 1,
        "preset": plan.preset.name,
        "config": _config(plan),
        "data": corpus.facts,
        "seeds": list(range(plan.seeds)),
        "arms": [_arm(plan, corpus, arm, runs[arm.name], rates) for arm in plan.arms],
        "measures": [measure.record() for measure, _ in measured],
        "values": _means(measured),
        "comparisons": [
            {
                "arm": compared.arm,
                "against": plan.arms[0].name,
                "measure": measure.name,
                "difference": compared.difference,
                "interval": None if compared.interval is None else list(compared.interval),
                "verdict": compared.verdict,
                "reason": compared.reason,
                "smallest_detectable": compared.smallest_detectable,
            }
            for measure, values in measured
            for compared in compare_to_first(
                values, better=measure.better, comparisons=comparisons, level=LEVEL
            )
        ],
        "family": {
            "comparisons": comparisons,
            "level": LEVEL,
            "degrees_of_freedom": degrees,
            "method": _method(degrees, comparisons),
        },
        "notes": notes,
    }


def _measured(
    plan: ComparePlan, runs: dict[str, list[Run]], rates: Values
) -> list[tuple[Measure, Values]]:
    """Every measure with its values [seeds, items] for each arm."""

    def items(kind: str, field: str, keep: Callable[[dict], bool] = lambda item: True) -> Values:
        return {
            arm: np.array([[item[field] for item in run[kind] if keep(item)] for run in of_arm])
            for arm, of_arm in runs.items()
        }

    losses = {
        arm: np.array([run["window_losses"] for run in of_arm]) for arm, of_arm in runs.items()
    }
    measured = [(Measure("heldout_loss", "held-out loss", "nats/token", "lower"), losses)]
    preset = plan.preset
    if preset.recall_share > 0:
        recall = "recall_items", "accuracy"
        measured.append((Measure("recall", "recall", "share", "higher"), items(*recall)))
        for needles, queries in preset.recall_cells:
            measure = Measure(
                f"recall[N={needles},R={queries}]",
                f"recall, {plural(needles, 'needle')}, {queries} queried",
                "share",
                "higher",
            )
            keep = _equals(needles=needles, queries=queries)
            measured.append((measure, items(*recall, keep)))
        for depth in preset.recall_depths:
            measure = Measure(
                f"recall[depth={depth:g}]",
                f"recall, first needle at {100 * depth:g} %",
                "share",
                "higher",
            )
            measured.append((measure, items(*recall, _equals(depth=depth))))
        answer = Measure("attention_answer", "attention on the answer", "share", "higher")
        noise = Measure("attention_noise", "attention on noise", "share", "lower")
        measured.append((answer, items("attention_items", "answer")))
        measured.append((noise, items("attention_items", "noise")))
    speed = Measure("tokens_per_second", "training speed", "tokens/s", "higher")
    return [*measured, (speed, rates)]


def _equals(**wanted: Any) -> Callable[[dict], bool]:
    return lambda item: all(item[name] == value for name, value in wanted.items())


def _means(measured: list[tuple[Measure, Values]]) -> dict[str, dict[str, Any]]:
    means: dict[str, dict[str, Any]] = defaultdict(dict)
    for measure, values in measured:
        for arm, array in values.items():
            by_seed = array.mean(axis=1)
            means[arm][measure.name] = {
                "mean": float(by_seed.mean()),
                "sd": float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None,
                "per_seed": by_seed.tolist(),
            }
    return dict(means)


def _arm(
    plan: ComparePlan, corpus: Corpus, arm: Arm, runs: list[Run], rates: Values
) -> dict[str, Any]:
    model = build_model(plan, arm, corpus)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    return {
        "name": arm.name,
        "label": arm.label,
        "attention": arm.attention,
        "parameters": parameters,
        "parameters_non_embedding": parameters - model.model.embed_tokens.weight.numel(),
        "flops_per_token": training_flops_per_token(model, plan.preset.length),
        "tokens": runs[0]["train_tokens"],
        "heads": _heads(config),
        "own_start": arm.own_start,
        "runs": [_run(run, rates[arm.name][place]) for place, run in enumerate(runs)],
    }


def _heads(config: Any) -> str:
    if config.attention == "softmax":
        return f"{plural(config.num_attention_heads, 'head')} of {config.head_dim}"
    sizes = config.diff_sizes(0)
    return (
        f"{plural(sizes.num_diff_heads, 'differential head')}, queries of {sizes.head_dim}, "
        f"values of {sizes.value_dim}"
    )


def _run(run: Run, rates: np.ndarray) -> dict[str, Any]:
    return {
        "seed": run["seed"],
        "heldout_loss": run["heldout_loss"],
        "train_seconds": run["train_seconds"],
        "tokens_per_second": float(rates[0]),
        "peak_memory_bytes": run["peak_memory_bytes"],
        "warnings": run["warnings"],
        "curve": run["curve"],
        "recall": _by_cell(run["recall_items"]),
        "attention": _attention(run["attention_items"]),
        "lam": run["lam"] or None,
    }


def _by_cell(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cells: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for item in items:
        cells[item["length"], item["needles"], item["queries"], item["depth"]].append(item)
    return [
        {
            "length": length,
            "needles": needles,
            "queries": queries,
            "depth": depth,
            "accuracy": float(np.mean([item["accuracy"] for item in members])),
            "swap": float(np.mean([item["swap"] for item in members])),
            "items": len(members),
        }
        for (length, needles, queries, depth), members in cells.items()
    ]


def _attention(items: list[dict[str, Any]]) -> dict[str, Any]:
    if not items:
        return {}
    by_depth: dict[float, list[dict[str, Any]]] = defaultdict(list)
    for item in items:
        by_depth[item["depth"]].append(item)

    def mean(members: list[dict[str, Any]], field: str) -> float:
        return float(np.mean([item[field] for item in members]))

    return {
        **{field: mean(items, field) for field in ("answer", "noise", "first")},
        "by_depth": [
            {
                "depth": depth,
                "answer": mean(members, "answer"),
                "noise": mean(members, "noise"),
            }
            for depth, members in by_depth.items()
        ],
    }


def _config(plan: ComparePlan) -> dict[str, Any]:
    record = plan.record()
    settings = {**record["preset"], "training_steps": plan.training_steps}
    settings["recall_stages"] = [list(stage) for stage in plan.recall_stages]
    return settings


def _method(degrees: int, comparisons: int) -> str:
    if degrees == 0:
        return f"{ONE_SEED.capitalize()}."
    return (
        f"Paired by seed and held-out item; t intervals with {plural(degrees, 'degree')} of "
        f"freedom, Bonferroni over {plural(comparisons, 'comparison')}; the noise between seeds is "
        "pooled over the arms unless a pair is noisier."
    )


def _notes(
    plan: ComparePlan,
    runs: dict[str, list[Run]],
    measured: list[tuple[Measure, Values]],
    looks: Sequence[int],
) -> list[str]:
    notes = []
    first = plan.arms[0]
    if plan.preset.recall_share > 0:
        recall = next(values for measure, values in measured if measure.name == "recall")
        mean, chance = float(recall[first.name].mean()), 1 / plan.preset.recall_values
        if not chance + 0.1 <= mean <= 0.95:
            notes.append(
                f"Recall of {first.label} is {100 * mean:.1f} %, outside "
                f"{100 * (chance + 0.1):.0f} to 95 %: near guessing or near perfect, recall cannot "
                "tell arms apart here."
            )
    if plan.seeds == 1:
        notes.append(f"Every verdict is 'no difference', since {ONE_SEED}. Use at least 3 seeds.")
    if looks:
        notes.append(
            f"Seeds were added after results of {' and '.join(map(str, looks))} had been seen. The "
            "intervals hold for a number of seeds that was chosen before; each look adds to the "
            "chance of a false difference."
        )
    for arm in plan.arms:
        spikes = sum(len(run["warnings"]) for run in runs[arm.name])
        if spikes:
            spiked = plural(spikes, "spike")
            notes.append(f"{arm.label}: {spiked} of loss or gradient norm; see the runs.")
        if arm.own_start:
            notes.append(f"{arm.label} has starting weights of its own, to show the noise.")
    return notes
