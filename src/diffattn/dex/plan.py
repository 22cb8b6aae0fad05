"""Plans of selected heads: made from scores, kept as JSON, drawn."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from diffattn.errors import UserError, needs_extra
from diffattn.whole_file import write_json

Criterion = Literal["entropy", "importance", "all"]


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """Which heads a differential extension is for, and why.

    Args:
        criterion: "entropy" (highest), "importance" (lowest) or "all".
        heads: selected heads of each layer.
        scores: [layers][heads] mean entropy in nats or importance in nats; none for "all".
        fingerprint: of the model's parameter names and shapes.
        options: how scores were measured.
    """

    criterion: Criterion
    heads: dict[int, list[int]]
    scores: list[list[float]]
    fingerprint: str
    options: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json(target, asdict(self))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "HeadPlan":
        """Read a plan.

        Raises:
            UserError: there is no such file, or it is no plan.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            heads = {
                int(layer): [int(h) for h in chosen] for layer, chosen in found["heads"].items()
            }
            return cls(**{**found, "heads": heads})
        except OSError as error:
            raise UserError(f"plan: {path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"plan: {path} is not a plan of heads") from error

    def check(self, fingerprint: str) -> None:
        """Refuse a plan of another architecture.

        Raises:
            UserError: the plan was made for a model with other parameters.
        """
        if self.fingerprint != fingerprint:
            raise UserError(
                f"plan: expected one for this model ({fingerprint}), got one for a model with "
                f"other names or shapes of parameters ({self.fingerprint})"
            )


def choose(scores: list[list[float]], count: int | None, *, highest: bool) -> dict[int, list[int]]:
    """The heads of each layer with the highest or lowest scores; of equals, the lowest index.

    Args:
        scores: [layers][heads].
        count: heads for each layer; None means half, rounded down, and at least one.
        highest: whether high scores are chosen.
    """
    heads = {}
    for layer, row in enumerate(scores):
        wanted = max(1, len(row) // 2) if count is None else count
        if not 1 <= wanted <= len(row):
            raise UserError(f"count: expected 1 to {len(row)} heads of a layer, got {count}")
        sign = -1.0 if highest else 1.0
        order = sorted(range(len(row)), key=lambda head: (sign * row[head], head))
        heads[layer] = sorted(order[:wanted])
    return heads


def terminal_map(plan: HeadPlan) -> str:
    """Scores of layers x heads as shades, selected heads in brackets."""
    shades, flat = " .:-=+*#%@", [score for row in plan.scores for score in row]
    low, high = (min(flat), max(flat)) if flat else (0.0, 0.0)
    widest = max(map(len, plan.scores or plan.heads.values()))
    lines = ["    head   " + "".join(f"{head:^3d}" for head in range(widest))]
    for layer, chosen in plan.heads.items():
        cells = []
        for head in range(len(plan.scores[layer]) if flat else len(chosen)):
            share = (plan.scores[layer][head] - low) / (high - low) if high > low else 0.0
            shade = shades[min(9, math.floor(share * 10))]
            cells.append(f"[{shade}]" if head in chosen else f" {shade} ")
        lines.append(f"layer {layer:3d}  {''.join(cells)}")
    if flat:
        lines.append(
            f"{plan.criterion} from '{shades[0]}' = {low:.3g} to '{shades[-1]}' = {high:.3g} nats "
            f"in the order '{shades}'; [ ] = selected"
        )
    return "\n".join(lines)


def draw(plan: HeadPlan, path: str | os.PathLike[str]) -> None:
    """Write a heat map of layers x heads as PNG, selected heads marked.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs_extra("the picture of a plan", "plot"):
        from matplotlib.figure import Figure
    rows = plan.scores or [[1.0] * len(chosen) for chosen in plan.heads.values()]
    widest = max(len(row) for row in rows)
    filled = [[*row, *[math.nan] * (widest - len(row))] for row in rows]
    figure = Figure(figsize=(2.5 + 0.3 * widest, 1.5 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(filled, aspect="auto", cmap="viridis")
    marks = [(head, layer) for layer, chosen in plan.heads.items() for head in chosen]
    axes.scatter(*zip(*marks, strict=True), s=14, facecolors="none", edgecolors="white")
    axes.set(xlabel="head", ylabel="layer", title=f"{plan.criterion}; circles are selected")
    figure.colorbar(image, label="nats")
    figure.savefig(path, dpi=120)
