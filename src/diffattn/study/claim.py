"""What DEX adds beyond tuning attention alone, on one card."""

from typing import Any

from diffattn.report.numbers import count_text, plural, scale_of
from diffattn.report.text_table import Column, grid, plain, wrap
from diffattn.report.verdicts import BETTER, WORSE
from diffattn.study.probes import MEASURES, Measure
from diffattn.study.results import PRIMARY

Results = dict[str, Any]
TITLE = "What DEX adds beyond tuning attention alone"


def sentence(results: Results) -> str:
    """The answer in a sentence."""
    found = results["claim"].get(PRIMARY)
    if found is None:
        return "No answer yet: DEX and attention alone have no run with a common seed."
    scale = scale_of("nats per token")
    size = f"{scale.difference(found['difference'])} nats per token"
    if found["seeds"] < 2:
        return (
            f"No answer yet: one seed each; DEX's held-out loss differs by {size}, and how much "
            "seeds differ is unknown."
        )
    low, high = found["interval"]
    span = f"{size}, 95 % interval {scale.interval((low, high))}, {found['seeds']} seeds"
    if found["verdict"] == BETTER:
        text = f"DEX's held-out loss is lower than attention-only tuning's: {span}."
    elif found["verdict"] == WORSE:
        text = f"DEX's held-out loss is higher than attention-only tuning's: {span}."
    else:
        text = (
            f"No difference between DEX and attention-only tuning in held-out loss: {span}. "
            f"A gain of more than {scale.size(max(0.0, -low))} would have been seen."
        )
    floor = (results["floor"] or {}).get(PRIMARY)
    if floor is not None:
        text += (
            f" Two runs that are equal in exact arithmetic differ by {scale.size(floor)}: "
            "nothing below that means anything."
        )
    return text


def rows(results: Results) -> list[dict[str, str]]:
    """DEX against attention alone, one row of text for each measure."""
    return [
        {"measure": f"{measure.title} ({measure.unit})", **row_of(measure, found, results["floor"])}
        for measure in MEASURES
        if (found := results["claim"].get(measure.name))
    ]


def row_of(
    measure: Measure, found: dict[str, Any], floor: dict[str, float] | None
) -> dict[str, str]:
    """A difference to attention alone as text."""
    scale = scale_of(measure.unit)
    interval = found["interval"]
    return {
        "control": scale.value(found["control"]),
        "value": scale.value(found["value"]),
        "difference": scale.difference(found["difference"]),
        "interval": scale.interval(None if interval is None else tuple(interval)),
        "over": found["over"],
        "floor": "not run" if floor is None else scale.size(floor[measure.name]),
        "verdict": found["verdict"],
    }


def circumstances(results: Results) -> list[tuple[str, str]]:
    """What the numbers rest on."""
    settings = results["settings"]
    tokens = settings["steps"] * settings["rows"] * settings["length"]
    rates = settings["rates"]
    machines = sorted({m["processor"] for m in results["machines"]})
    return [
        ("model", settings["model"]),
        ("text", settings["data"] or "bundled State of the Union addresses"),
        ("training", f"{settings['steps']} steps, {count_text(tokens)} tokens a run"),
        ("precision", "bf16 autocast, fp32 weights" if settings["bf16"] else "fp32"),
        ("tuning", f"{plural(len(rates), 'rate')} an arm, {settings['tuning_steps']} steps each"),
        (
            "seeds",
            f"{settings['seeds']} of these two, {settings['other_seeds']} of the others",
        ),
        ("machine", "; ".join(machines)),
        ("command", results["command"]),
    ]


def claim_card(results: Results) -> str:
    """The card as Markdown."""
    lines = [f"# {TITLE}", "", sentence(results), ""]
    lines += [
        "| measure | attention only | DEX | DEX - attention only | 95 % interval "
        "| rounding floor | verdict |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows(results):
        cells = ("measure", "control", "value", "difference", "interval", "floor", "verdict")
        lines.append("| " + " | ".join(row[cell] for cell in cells) + " |")
    lines += [
        "",
        "The held-out loss decides; every other measure is secondary, and each interval holds by "
        "itself, not jointly. The rounding floor is the difference of two attention-only runs that "
        "are equal in exact arithmetic.",
        "",
        *(f"- {name}: {value}" for name, value in circumstances(results)),
    ]
    return "\n".join(plain(line) for line in lines) + "\n"


def terminal(results: Results) -> str:
    """Answer and arms for a terminal, the control first."""
    columns = (
        Column("arm", 30),
        Column("trained", 8, ">"),
        *(Column(measure.title, 12, ">") for measure in MEASURES),
    )
    arms = sorted(results["arms"], key=lambda arm: arm["name"] not in ("base", "attention"))
    table = [
        (
            arm["title"],
            count_text(arm["trained"]),
            *(scale_of(m.unit).value(arm["means"][m.name]) for m in MEASURES),
        )
        for arm in arms
    ]
    lines = [*grid(columns, table), "", *wrap([sentence(results)])]
    return "\n".join(plain(line) for line in lines) + "\n"
