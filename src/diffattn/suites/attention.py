"""Attention on the answer, on noise, on the first token and on the question, by depth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from diffattn.data.needle_prompts import NeedlePrompt
from diffattn.errors import UserError
from diffattn.evaluation.attention_rows import last_rows
from diffattn.evaluation.continuations import ReadContext
from diffattn.evaluation.shares import (
    RULES,
    absolute_entropy,
    attention_parts,
    negative_mass,
    row_shares,
)
from diffattn.report.tables import Figure, Table
from diffattn.suites import plots, retrieval
from diffattn.suites.claim import Claim, Measure
from diffattn.suites.records import Record
from diffattn.suites.subject import Loaded
from diffattn.suites.suite import Measured
from diffattn.suites.text import Text

ABOUT = "where a question looks: its answer, other text, the first token, itself"
TEMPLATE = retrieval.TEMPLATE
_SMALL = 0.05  # a row sum below it makes shares by the row sum explode


@dataclass(frozen=True, kw_only=True)
class Settings(retrieval.Settings):
    """Settings of the suite `attention`: those of `retrieval`'s prompts, and a rule.

    Args:
        rule: how signed rows become shares: "abs", "raw" or "rowsum"; all three are recorded.
    """

    cells: tuple[str, ...] = ("6x1",)
    rule: str = "abs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise UserError(
                f"attention.rule: expected one of {', '.join(RULES)}, got {self.rule!r}"
            )


def items(settings: Settings, loaded: Loaded, text: Text) -> list[NeedlePrompt]:
    """The prompts of `retrieval`, whose spans say where the answers lie."""
    return retrieval.items(settings, loaded, text)


def measure(settings: Settings, loaded: Loaded, items: Sequence[NeedlePrompt]) -> Iterator[Record]:
    """Shares of the last token of the question for all, means over layers and heads."""
    for item in items:
        yield _measured(settings, loaded, item)


def _measured(settings: Settings, loaded: Loaded, item: NeedlePrompt) -> Record:
    layers = last_rows(ReadContext(loaded.model, item.context), item.together.prompt)
    asked = set(item.together.cities)
    spans = [
        span for span, (city, _) in zip(item.spans, item.needles, strict=True) if city in asked
    ]
    parts = attention_parts(len(item.prompt), spans, len(item.context))
    shares = {
        rule: _mean([row_shares(rows.used, parts, rule) for rows in layers]) for rule in RULES
    }
    chosen = shares[settings.rule]
    noise = chosen["noise"]
    sums = [rows.used.double().sum(-1).abs().min().item() for rows in layers]
    unsafe = settings.rule == "rowsum" and min(sums) < _SMALL
    values: dict[str, float | None] = {
        **chosen,
        "ratio": chosen["answer"] / noise if noise else None,
        "negative": float(np.mean([negative_mass(rows.used) for rows in layers])),
        "entropy": float(np.mean([absolute_entropy(rows.used) for rows in layers])),
    }
    finite = all(value is None or np.isfinite(value) for value in values.values())
    pairs = [(rows.signal, rows.noise) for rows in layers if rows.noise is not None]
    both = {
        name: _mean([row_shares(pair[n], parts, "raw") for pair in pairs])
        for n, name in enumerate(("signal", "noise"))
        if pairs
    }
    return {
        "id": item.id,
        "cluster": None,
        "values": values if finite else dict.fromkeys(values),
        "flags": ["a row sum is near 0"] * unsafe + ["weights are not finite"] * (not finite),
        "rules": shares,
        "maps": both,
        "layers": [row_shares(rows.used, parts, settings.rule) for rows in layers],
        "length": len(item.prompt),
        "depth": item.depth,
    }


def _mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def claims(settings: Settings) -> list[Claim]:
    """More on the answer, less on noise."""
    where = "arXiv 2410.05258, Table 3"
    return [
        Claim(
            name="attention",
            text="More attention lies on the answer.",
            measure=Measure(
                name="answer", label="on the answer", unit="share", better="higher", margin=0.005
            ),
            paper=f"0.27 to 0.40 against 0.03 to 0.09 over depths ({where})",
        ),
        Claim(
            name="attention-noise",
            text="Less attention lies on the rest of the context.",
            measure=Measure(
                name="noise", label="on noise", unit="share", better="lower", margin=0.005
            ),
            paper=f"0.01 to 0.02 against 0.49 to 0.54 over depths ({where})",
        ),
    ]


def tables(settings: Settings, measured: Measured) -> list[Table]:
    """Every measure by model and depth."""
    names = ("answer", "noise", "first", "query", "ratio", "negative", "entropy")
    rows = []
    for name, seeds in measured.items():
        records = [record for found in seeds for record in found.values()]
        for depth in dict.fromkeys(record["depth"] for record in records):
            mine = [record for record in records if record["depth"] == depth]
            where = "anywhere" if depth is None else f"{depth:g}"
            rows.append((f"{name}, {where}", str(len(mine)), *(_cell(mine, key) for key in names)))
    title = f"Attention of the question's last token, rule {settings.rule}"
    return [Table(title, ("model, depth", "prompts", *names), rows)]


def _cell(records: Sequence[Record], key: str) -> str:
    values = [r["values"][key] for r in records if r["values"][key] is not None]
    return f"{np.mean(values):.4f}" if values else "n/a"


def figures(settings: Settings, measured: Measured) -> list[Figure]:
    """Answer, noise and first token over depth."""
    if settings.placed == "random" or len(settings.depths) < 2:
        return []
    panels = {name: retrieval._over_depth(measured, name) for name in ("answer", "noise", "first")}
    drawn = plots.lines(
        "attention-depth",
        "Attention over depth",
        {title: lines for title, lines in panels.items() if lines},
        across="depth of the needle",
        up=f"share, {settings.rule}",
        logarithmic=False,
    )
    return [Figure("Attention over depth", drawn, "Means over layers, heads and prompts.")]
