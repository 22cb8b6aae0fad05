"""What DEX adds beyond tuning attention alone, on one card."""

from typing import Any

from diffattn.report.numbers import count_text, plural, scale_of
from diffattn.report.text_table import Column, grid, plain, wrap
from diffattn.report.verdicts import BETTER, WORSE
from diffattn.study.arms import arm_named
from diffattn.study.probes import MEASURES, Measure
from diffattn.study.results import ONE_SEED, PRIMARY

Results = dict[str, Any]
TITLE = "What DEX adds beyond tuning attention alone"
READING = (
    "The held-out loss decides; every other measure is secondary, and each interval holds by "
    "itself, not jointly. With one seed there is no verdict. The noise floor is the difference of "
    "two attention-only runs that are equal in exact arithmetic and round in different ways. "
    "Differences of shares are in points; chance is 1 in 10 for many-shot lists, none for needles."
)
OFF = 0.01
"""below this |Delta| / |O| the extension counts as switched off"""


def sentence(results: Results) -> str:
    """The answer in a sentence or two."""
    found = results["claim"].get(PRIMARY)
    if found is None:
        return "No answer yet: DEX and attention alone have no measured run with a common seed."
    scale = scale_of("nats per token")
    size = f"{scale.difference(found['difference'])} nats per token"
    if found["verdict"] == ONE_SEED:
        return (
            f"No answer: one seed each. DEX's held-out loss differs by {size}, and how much seeds "
            "differ is unknown."
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


def caveats(results: Results) -> list[str]:
    """What a reader must know before believing the answer."""
    found = []
    if results["runs_open"]:
        found.append(
            f"Unfinished: {plural(results['runs_open'], 'run')} of "
            f"{results['runs_open'] + results['runs_done']} to be done."
        )
    if diverged := [arm for arm in results["arms"] if arm["diverged"]]:
        named = (
            f"{arm['title']} (seed {', '.join(map(str, arm['diverged']))})" for arm in diverged
        )
        found.append(f"Diverged, and left out of every mean: {'; '.join(named)}.")
    end = results["end"].get("dex")
    if end:
        said = (
            f"At the end of training DEX has lam = {end['lam']:.2g} in the mean of layers, and "
            f"subtracts {end['ratio']:.2%} of the norm of the selected heads."
        )
        if end["ratio"] < OFF:
            said += (
                " The extension ends switched off: lam(t) follows lambda_learn from t = T on, "
                "which starts at 0 and hardly moved. What is left is attention-only tuning on "
                "another path."
            )
        found.append(said)
    if results["at_the_edge"]:
        titles = "; ".join(arm_named(name).title for name in results["at_the_edge"])
        found.append(
            f"The best learning rate tried was the lowest or highest one for: {titles}. A wider "
            "--rates might find a better one."
        )
    return found


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
    scale, interval = scale_of(measure.unit), found["interval"]
    if interval is not None and interval[0] == interval[1] == 0:
        span = "all items alike"
    else:
        span = scale.interval(None if interval is None else tuple(interval))
    return {
        "control": scale.value(found["control"]),
        "value": scale.value(found["value"]),
        "difference": scale.difference(found["difference"]),
        "interval": span,
        "over": found["over"],
        "floor": "not run" if floor is None else scale.size(floor[measure.name]),
        "verdict": found["verdict"],
    }


def circumstances(results: Results) -> list[tuple[str, str]]:
    """What the numbers rest on."""
    settings = results["settings"]
    tokens = settings["steps"] * settings["rows"] * settings["length"]
    rates = settings["rates"]
    machines = sorted({f"{m['processor']}, {m['cores']} cores" for m in results["machines"]})
    chosen = (
        f"{arm['title']} {arm['rate']:.1e}" for arm in results["arms"] if arm["rate"] is not None
    )
    tried = f"{len(rates)} rates an arm, {settings['tuning_steps']} steps each; "
    return [
        ("model", settings["model"]),
        ("text", settings["data"] or "bundled State of the Union addresses"),
        ("other text", settings["outside"] or "bundled questions to a bank (BANKING77)"),
        (
            "training",
            f"{settings['steps']} steps of {settings['rows']} x {settings['length']} tokens, "
            f"{count_text(tokens)} tokens a run, "
            + ("bf16 autocast, fp32 weights" if settings["bf16"] else "fp32"),
        ),
        ("schedule", f"T = {settings.get('ramp_steps') or settings['steps'] // 2} steps"),
        ("heads", f"{settings['heads']}, half of each layer unless a plan says otherwise"),
        ("learning rates", (tried if len(rates) > 1 else "not tuned; ") + "; ".join(chosen)),
        ("seeds", f"{settings['seeds']} of DEX and attention only, {settings['other_seeds']} else"),
        (
            "measured on",
            f"{settings['heldout_windows']} held-out windows, {settings['outside_windows']} of "
            f"other text, {settings['items']} texts with needles and {settings['items']} lists of "
            f"examples of {settings['context']} tokens, all in fp32",
        ),
        ("machine", "; ".join(machines)),
        ("inputs", ", ".join(f"{n} {d[:12]}" for n, d in results["inputs"].items())),
        ("made by", f"diffattn {results['version']}, {results['created']}"),
        ("command", results["command"]),
    ]


def claim_card(results: Results) -> str:
    """The card as Markdown."""
    lines = [f"# {TITLE}", "", sentence(results), ""]
    lines += [line for caveat in caveats(results) for line in (caveat, "")]
    lines += [
        "| measure | attention only | DEX | DEX - attention only | 95 % interval | over "
        "| noise floor | verdict |",
        "|---|---:|---:|---:|---:|---|---:|---|",
    ]
    cells = ("measure", "control", "value", "difference", "interval", "over", "floor", "verdict")
    lines += ["| " + " | ".join(row[cell] for cell in cells) + " |" for row in rows(results)]
    lines += ["", READING, "", *(f"- {name}: {value}" for name, value in circumstances(results))]
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
    lines = [*grid(columns, table), "", *wrap([sentence(results), *caveats(results)])]
    return "\n".join(plain(line) for line in lines) + "\n"
