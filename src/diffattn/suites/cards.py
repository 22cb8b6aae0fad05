"""Claim cards: what the records of all models say of a claim."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffattn.evaluation.bootstrap import bootstrap_interval, verdict_of
from diffattn.suites.claim import Claim
from diffattn.suites.suite import Measured

Card = dict[str, Any]
ALONE = "one model: nothing to compare it with"
ONE_SEED = "one model on each side: the interval says nothing of other seeds"
OTHER_TOKENS = "the models' tokenizers differ, so their tokens cannot be compared"
NO_VALUES = "fewer than two documents or lists have a value in all models"


def make_card(
    claim: Claim,
    measured: Measured,
    *,
    configuration: Mapping[str, Any],
    weights: Mapping[str, Sequence[str]],
    same_tokens: bool,
) -> Card:
    """The card of a claim.

    Every later model is compared with the first one, on the items that have a value in all of
    them, seeds paired in order. One model is compared with the best content-free strategy, where
    the claim names one.

    Args:
        claim: what is claimed.
        measured: the records.
        configuration: what they rest on; stands on the card.
        weights: what tells the models of each subject from others.
        same_tokens: whether all models have one tokenizer.

    Returns:
        `claim`, `effect`, `interval`, `verdict`, `reason`, and all that they come from. Of several
        comparisons the first one stands on top.
    """
    values, clusters = _values(claim, measured)
    first, *others = values
    models = [
        {
            "name": name,
            "seeds": len(array),
            "mean": float(array.mean()) if array.size else None,
            "by_seed": array.mean(axis=1).tolist() if array.size else [],
        }
        for name, array in values.items()
    ]
    comparisons = []
    for name in others:
        paired = _paired(values[first], values[name])
        # what differs in nothing is one model; other models may agree by chance
        careful = claim.measure.unit == "share" and weights[name] != weights[first]
        reason = OTHER_TOKENS if claim.same_tokens and not same_tokens else None
        comparisons.append(
            {
                "model": name,
                "against": first,
                **_effect(claim, paired, clusters, reason, careful=careful),
            }
        )
    if comparisons:
        top = {n: v for n, v in comparisons[0].items() if n not in ("model", "against")}
    elif claim.content_free is not None:
        above = values[first] - claim.content_free
        careful = claim.measure.unit == "share"
        top = _effect(claim, above, clusters, None, careful=careful)
    else:
        mean = models[0]["mean"]
        top = {"effect": mean, "interval": None, "verdict": "undecided", "reason": ALONE}
    return {
        "claim": claim.text,
        **top,
        "paper": claim.paper,
        "measure": {
            "name": claim.measure.name,
            "label": claim.measure.label,
            "unit": claim.measure.unit,
            "better": claim.measure.better,
            "margin": claim.measure.margin,
        },
        "content_free": claim.content_free,
        "strategy": claim.strategy,
        "items": len(clusters),
        "clusters": len(set(clusters)),
        "seeds": min(len(array) for array in values.values()),
        "flagged": {
            name: sum(bool(record["flags"]) for found in seeds for record in found.values())
            for name, seeds in measured.items()
        },
        "models": models,
        "comparisons": comparisons,
        "configuration": dict(configuration),
    }


def _values(claim: Claim, measured: Measured) -> tuple[dict[str, np.ndarray], list[str]]:
    """Values [seeds, items] of each model on the items that all have, and the items' clusters."""
    name = claim.measure.name
    every = [found for seeds in measured.values() for found in seeds]
    kept = [
        item
        for item in every[0]
        if all(item in found and found[item]["values"].get(name) is not None for found in every)
    ]
    values = {
        subject: np.array(
            [[found[i]["values"][name] for i in kept] for found in seeds], dtype=float
        )
        for subject, seeds in measured.items()
    }
    return values, [every[0][item].get("cluster") or item for item in kept]


def _paired(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Differences [seeds, items]; a model that stands alone meets every seed of the other."""
    if 1 in (len(first), len(second)):
        return second - first
    seeds = min(len(first), len(second))
    return second[:seeds] - first[:seeds]


def _effect(
    claim: Claim, values: np.ndarray, clusters: list[str], reason: str | None, *, careful: bool
) -> dict[str, Any]:
    measure = claim.measure
    interval = None
    if reason is None:
        if values.size:
            interval = bootstrap_interval(values, clusters=clusters, careful=float(careful))
        reason = NO_VALUES if interval is None else ONE_SEED if len(values) == 1 else None
    return {
        "effect": float(values.mean()) if values.size else None,
        "interval": None if interval is None else list(interval),
        "verdict": verdict_of(interval, better=measure.better, margin=measure.margin),
        "reason": reason,
    }
