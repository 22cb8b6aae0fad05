"""Draws the figures of a study, each as SVG text."""

from __future__ import annotations

from typing import Any, Final

from diffattn.report.numbers import scale_of
from diffattn.report.palette import ARM_COLORS, HEAT, INK, MUTED, VERDICT_COLORS
from diffattn.report.plot_style import WIDTH, figure, style, svg, words
from diffattn.report.verdicts import NO_DIFFERENCE
from diffattn.study.arms import arm_named
from diffattn.study.probes import MEASURES
from diffattn.study.results import ONE_SEED

Results = dict[str, Any]
_SHAPES: Final = ("o", "s", "^", "D", "v", "<", ">", "p", "h", "8")
_LINES: Final = ("-", "-", "--", ":", "-.", "-")
_DRAWN_HEADS: Final = ("base", "attention", "dex", "extension", "lora", "retrofit")


def differences(results: Results) -> str:
    """Draws every arm's difference to attention alone, one panel a measure; right is better."""
    name, title = "differences", "Differences to attention-only tuning"
    arms = [a for a, found in results["differences"].items() if found and a != "base"]
    if not arms:
        return words(name, title, "No arm has a run beside attention alone yet.")
    with style():
        fig = figure(WIDTH, 1.8 + 2 * 0.27 * (len(arms) + 1.5))
        axes = fig.subplots(2, 3, sharey=True).flatten()
        order = sorted(range(len(MEASURES)), key=lambda n: (n % 2, n // 2))
        for ax, index in zip(axes, order, strict=True):
            measure = MEASURES[index]
            sign = 1 if measure.better == "higher" else -1
            scale = scale_of(measure.unit)
            for row, arm in enumerate(arms):
                found = results["differences"][arm][measure.name]
                color = VERDICT_COLORS.get(found["verdict"], VERDICT_COLORS[NO_DIFFERENCE])
                place = sign * scale.factor * found["difference"]
                if found["interval"] is not None:
                    ends = sorted(sign * scale.factor * end for end in found["interval"])
                    line = ":" if found["verdict"] == ONE_SEED else "-"
                    ax.plot(ends, [row, row], line, color=color, linewidth=1.6)
                ax.plot([place], [row], "o", color=color, markersize=5)
            ax.axvline(0, color=INK, linewidth=0.8)
            if results["floor"] is not None:
                floor = scale.factor * results["floor"][measure.name]
                ax.axvspan(-floor, floor, color=MUTED, alpha=0.25, linewidth=0)
            unit = scale.difference_unit or measure.unit
            ax.set_title(measure.title)
            ax.set_xlabel(f"improvement ({unit})")
            ax.locator_params(axis="x", nbins=4)
            ax.set_yticks(range(len(arms)), [arm_named(arm).title for arm in arms])
            ax.tick_params(axis="y", labelcolor=INK)
        axes[0].set_ylim(len(arms) - 0.5, -0.5)
        return svg(fig, name, f"{title}: {', '.join(arms)}.")


def learning_and_forgetting(results: Results) -> str:
    """Draws the loss on the text that was learned against the loss on other text."""
    name, title = "forgetting", "What is learned and what is forgotten"
    arms = [arm for arm in results["arms"] if arm["means"]["heldout_loss"] is not None]
    base = next((arm for arm in arms if arm["name"] == "base"), None)
    if base is None or len(arms) < 2:
        return words(name, title, "There is no base model, or nothing beside it, to draw yet.")
    with style():
        fig = figure(WIDTH, 3.6)
        ax = fig.subplots()
        for index, arm in enumerate(a for a in arms if a is not base):
            x, y = (
                arm["means"][key] - base["means"][key] for key in ("heldout_loss", "outside_loss")
            )
            color = ARM_COLORS[index % len(ARM_COLORS)]
            # hollow, each of its own size: arms that agree stay visible
            ax.plot(
                [x],
                [y],
                _SHAPES[index % len(_SHAPES)],
                color=color,
                fillstyle="none",
                markersize=6 + index,
                markeredgewidth=1.6,
                label=arm["title"],
            )
        ax.plot([0], [0], "x", color=INK, label=base["title"])
        ax.set_xlabel("held-out loss, difference to the base model (nats per token)")
        ax.set_ylabel("loss on other text, difference")
        fig.legend(loc="outside right upper")
        return svg(fig, name, f"{title}: {', '.join(arm['title'] for arm in arms)}.")


def trajectories(results: Results) -> str:
    """Draws lam and the relative size of the correction over the steps, a line a layer."""
    name, title = "trajectories", "λ and the size of the correction while training"
    found = results["trajectories"]
    if not found:
        return words(name, title, "No arm with a λ has a run yet.")
    with style():
        fig = figure(WIDTH, 0.6 + 1.75 * len(found))
        axes = fig.subplots(len(found), 2, squeeze=False, sharex=True)
        for (left, right), (arm, records) in zip(axes, found.items(), strict=True):
            steps = [record["step"] for record in records]
            for ax, key in ((left, "lam"), (right, "ratio")):
                if key not in records[0]:
                    ax.set_axis_off()
                    continue
                layers = len(records[0][key])
                for layer in range(layers):
                    line = [record[key][layer] for record in records]
                    alpha = 0.15 + 0.85 * layer / max(1, layers - 1)
                    ax.plot(steps, line, color=HEAT, alpha=alpha, linewidth=1.0)
            left.set_title(f"{arm_named(arm).title}: λ (no unit)")
            left.locator_params(axis="x", integer=True)
            if "ratio" in records[0]:
                right.set_title(f"{arm_named(arm).title}: |Δ| / |O|")
        for ax in axes[-1]:
            ax.set_xlabel("optimizer step")
        return svg(fig, name, f"{title}, one line per layer: {', '.join(found)}.")


def heads(results: Results) -> str:
    """Draws how much the heads of each layer changed in how unlike they are."""
    name, title = "heads", "Redundancy of heads, change by training"
    found = {arm: results["heads"][arm] for arm in _DRAWN_HEADS if arm in results["heads"]}
    before = found.pop("base", None)
    if before is None or not found or None in before["map_distance"]:
        return words(
            name, title, "There are no pairs of heads, no base model, or nothing beside it."
        )
    with style():
        fig = figure(WIDTH, 3.2)
        axes = fig.subplots(1, 2)
        labels = ("map_distance", "distance of maps"), ("output_cka", "linear CKA of outputs")
        for ax, (key, label) in zip(axes, labels, strict=True):
            mean = sum(before[key]) / len(before[key])
            for index, (arm, values) in enumerate(found.items(), start=1):
                change = [after - old for after, old in zip(values[key], before[key], strict=True)]
                color = ARM_COLORS[index % len(ARM_COLORS)]
                line = _LINES[index % len(_LINES)]
                ax.plot(change, line, color=color, linewidth=1.4, label=arm_named(arm).title)
            ax.axhline(0, color=INK, linewidth=0.8)
            ax.set_title(f"{label}, change (base model: {mean:.3f} in the mean)")
            ax.set_xlabel("layer")
        fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        return svg(fig, name, f"{title}, by layer: {', '.join(found)}.")
