"""Turns the results of a comparison into numbers, words and tables that people can read."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

Results = Mapping[str, Any]

MISSING: Final = "n/a"
BETTER: Final = "better"
WORSE: Final = "worse"
NO_DIFFERENCE: Final = "no difference"
UNDECIDED: Final = "no interval"
_DECIDED: Final = (BETTER, WORSE)
VERDICTS: Final = (BETTER, NO_DIFFERENCE, WORSE, UNDECIDED, MISSING)

HEADLINES: Final = (
    "heldout_loss",
    "recall",
    "attention_answer",
    "attention_noise",
    "tokens_per_second",
)

ATTENTION_DEFINITION: Final = (
    "Share of absolute attention weight of the query token (the last prompt token that asks for "
    "a needle), averaged over heads, layers and items; answer = the queried needle, noise = the "
    "other context tokens; the first token (BOS) and the question itself are neither."
)

_WIDTH: Final = 100
_NAMES_IN_A_SENTENCE: Final = 6
_SPACE: Final = "\N{NO-BREAK SPACE}"
_MINUS: Final = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Scale:
    """How the numbers of one measure are printed.

    Attributes:
        factor: What a number is multiplied by first.
        decimals: The digits after the point.
        unit: The unit of a value.
        difference_unit: The unit of a difference between two values.
    """

    factor: float
    decimals: int
    unit: str
    difference_unit: str

    def value(self, value: float) -> str:
        """Prints a value, or 'n/a' where there is none."""
        text = self.bare(value)
        return _with_unit(text, "%") if self.unit == "%" and text != MISSING else text

    def bare(self, value: float) -> str:
        """Prints a value without even a percent sign."""
        if not math.isfinite(value):
            return MISSING
        return f"{self.factor * value:,.{self.decimals}f}".replace("-", _MINUS)

    def difference(self, difference: float, *, unit: bool = False) -> str:
        """Prints a difference with its sign; zero has none."""
        if not math.isfinite(difference):
            return MISSING
        scaled = self.factor * difference
        sign = "+" if scaled else ""
        text = f"{scaled:{sign},.{self._digits(scaled)}f}".replace("-", _MINUS)
        return _with_unit(text, self.difference_unit) if unit else text

    def interval(self, interval: tuple[float, float] | None) -> str:
        """Prints the two ends of the interval of a difference."""
        if interval is None:
            return MISSING
        low, high = (self.factor * end for end in interval)
        digits = self._digits(max(abs(low), abs(high)))
        return f"{low:+,.{digits}f} to {high:+,.{digits}f}".replace("-", _MINUS)

    def size(self, size: float, *, unit: bool = False) -> str:
        """Prints how large a difference is, without a sign."""
        return self.difference(abs(size), unit=unit).removeprefix("+")

    def _digits(self, scaled: float) -> int:
        """Adds digits where a difference that is not zero would be printed as zero."""
        digits = self.decimals
        while scaled and digits < self.decimals + 3 and abs(scaled) < 0.5 * 10.0**-digits:
            digits += 1
        return digits


@dataclass(frozen=True)
class Measure:
    """One thing that is measured for every arm.

    Attributes:
        name: The name in the results.
        label: The name for readers.
        unit: The unit of the stored value.
        better: Which direction is better, "lower" or "higher".
    """

    name: str
    label: str
    unit: str
    better: str

    @property
    def scale(self) -> Scale:
        """How the numbers of this measure are printed."""
        if self.unit in ("share", "fraction") or self.name.startswith(("recall", "attention")):
            return Scale(100.0, 1, "%", "points")
        if self.unit == "tokens/s" or self.name == "tokens_per_second":
            return Scale(1.0, 0, "tokens/s", "tokens/s")
        return Scale(1.0, 4, self.unit, self.unit)

    @property
    def group(self) -> str:
        """Which measures belong together: the cells of one break-down share a group."""
        return self.name.partition("=")[0] if "[" in self.name else ""

    @property
    def sign(self) -> float:
        """One where a higher value is better, minus one where a lower value is."""
        return -1.0 if self.better == "lower" else 1.0


@dataclass(frozen=True)
class MeasureRow:
    """One comparison: one arm against its reference on one measure.

    Attributes:
        measure: What was measured.
        arm: The name of the arm.
        arm_label: The arm's name for readers.
        against: The name of the arm that it is compared with.
        against_label: That arm's name for readers.
        value: The arm's mean over seeds, as text.
        reference: The reference's mean over seeds, as text.
        difference: The arm minus its reference, as text.
        interval: The interval of the difference, as text.
        smallest: The smallest difference the run could have detected, as text.
        verdict: One of `VERDICTS`.
        raw_difference: The difference as a number, NaN where there is none.
        raw_interval: The interval as numbers, None where there is none.
        raw_smallest: The smallest detectable difference as a number, NaN where there is none.
    """

    measure: Measure
    arm: str
    arm_label: str
    against: str
    against_label: str
    value: str
    reference: str
    difference: str
    interval: str
    smallest: str
    verdict: str
    raw_difference: float
    raw_interval: tuple[float, float] | None
    raw_smallest: float


@dataclass(frozen=True)
class Statistic:
    """The mean over seeds and its spread, as text.

    Attributes:
        mean: The mean.
        sd: The standard deviation between seeds, empty where there is none.
        text: Both together.
    """

    mean: str
    sd: str
    text: str


@dataclass(frozen=True)
class ArmRow:
    """One arm at a glance.

    Attributes:
        name: The arm's name in the results.
        label: The arm's name for readers.
        detail: The arm's attention and heads, as text.
        parameters: How many parameters it has, as text.
        body_parameters: How many of them are not embeddings, as text.
        flops: Floating-point operations per token, as text.
        values: Mean and spread over seeds by measure name.
        comparisons: The arm's comparison by measure name, empty for the reference.
    """

    name: str
    label: str
    detail: str
    parameters: str
    body_parameters: str
    flops: str
    values: Mapping[str, Statistic]
    comparisons: Mapping[str, MeasureRow]


@dataclass(frozen=True)
class ArmAnswer:
    """What the run says about one arm, in one sentence.

    Attributes:
        arm: The name of the arm.
        label: The arm's name for readers.
        text: What follows the label, with the space or colon between them.
        counts: How many measures got each verdict, in the order of `VERDICTS`.
    """

    arm: str
    label: str
    text: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Answer:
    """What the run says, in plain language.

    Attributes:
        lead: The words before the sentences about arms.
        arms: One sentence per compared arm.
        explanations: What the words of the sentences mean.
    """

    lead: str
    arms: Sequence[ArmAnswer]
    explanations: Sequence[str]


@dataclass(frozen=True)
class _Column:
    """One column of a plain-text table: its title, its largest width and its alignment."""

    title: str
    width: int
    align: str = "<"


def number(value: object) -> float:
    """Reads a number that may be missing: None, NaN and infinities become NaN."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan


def count_text(value: object) -> str:
    """Prints a large count with three digits and a suffix, such as '1.23 M'."""
    amount = number(value)
    if not math.isfinite(amount):
        return MISSING
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(amount) >= 0.9995 * size:
            return _with_unit(f"{amount / size:#.3g}".rstrip("."), suffix)
    return f"{amount:.0f}"


def plural(count: int, noun: str) -> str:
    """Prints a count with its noun: '1 seed', '3 seeds'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent_text(share: object, decimals: int = 1) -> str:
    """Prints a share between zero and one as a percentage."""
    return Scale(100.0, decimals, "%", "points").value(number(share))


def level_text(results: Results) -> str:
    """Prints the joint confidence level, such as '95 %'."""
    level = number(_family(results).get("level"))
    return MISSING if math.isnan(level) else _with_unit(f"{100.0 * level:g}", "%")


def labels(results: Results) -> dict[str, str]:
    """Names every arm for readers, in the order of the results."""
    return {arm["name"]: str(arm.get("label") or arm["name"]) for arm in results.get("arms") or ()}


def measures(results: Results) -> list[Measure]:
    """Lists the measures: those of the whole run first, then the break-downs."""
    listed = [
        Measure(
            name=item["name"],
            label=str(item.get("label") or item["name"]),
            unit=str(item.get("unit") or ""),
            better=str(item.get("better") or "higher"),
        )
        for item in results.get("measures") or ()
    ]
    return sorted(listed, key=lambda measure: measure.group != "")


def measure_table(results: Results) -> list[MeasureRow]:
    """Lists every comparison, grouped by measure and in the order of the arms.

    Args:
        results: The results of a comparison.

    Returns:
        One row per comparison.
    """
    by_key = {(item["measure"], item["arm"]): item for item in results.get("comparisons") or ()}
    names = labels(results)
    return [
        _measure_row(results, names, measure, by_key[measure.name, arm])
        for measure in measures(results)
        for arm in names
        if (measure.name, arm) in by_key
    ]


def arm_table(results: Results) -> list[ArmRow]:
    """Lists every arm at a glance, in the order of the results."""
    rows = measure_table(results)
    known = {measure.name: measure for measure in measures(results)}
    return [_arm_row(results, arm, known, rows) for arm in results.get("arms") or ()]


def answer(results: Results) -> Answer:
    """Says in plain language what the comparison found.

    Args:
        results: The results of a comparison.

    Returns:
        The answer, one sentence per compared arm and the explanation of its words.
    """
    rows = measure_table(results)
    if not rows:
        return Answer("This run compares nothing: it holds no second arm.", (), ())
    seeds = plural(len(results.get("seeds") or ()), "seed")
    against = ", ".join(dict.fromkeys(row.against_label for row in rows))
    arms = [
        _arm_answer([row for row in rows if row.arm == arm])
        for arm in dict.fromkeys(row.arm for row in rows)
    ]
    return Answer(f"Against {against}, with {seeds}:", arms, _explanations(results, rows, seeds))


def terminal_table(results: Results) -> str:
    """Prints the comparison as plain text of at most 100 columns.

    Args:
        results: The results of a comparison.

    Returns:
        The answer, the table of arms and the table of the main differences.
    """
    summary = answer(results)
    blocks = [_wrap([str(results.get("title") or "Comparison")]), _terminal_arms(results)]
    differences = _terminal_differences(results)
    if differences:
        blocks.append(differences)
    sentences = [f"- {arm.label}{arm.text}" for arm in summary.arms]
    blocks.append(_wrap([summary.lead, *sentences]))
    if summary.explanations:
        blocks.append(_wrap(summary.explanations))
    notes = [f"Note: {note}" for note in results.get("notes") or ()]
    if notes:
        blocks.append(_wrap(notes))
    return "\n\n".join("\n".join(_plain(line) for line in block) for block in blocks) + "\n"


def _with_unit(text: str, unit: str) -> str:
    return f"{text}{_SPACE}{unit}" if unit else text


def _family(results: Results) -> Mapping[str, Any]:
    return results.get("family") or {}


def _statistics(results: Results, arm: str, measure: str) -> Mapping[str, Any]:
    return ((results.get("values") or {}).get(arm) or {}).get(measure) or {}


def _interval(item: Mapping[str, Any]) -> tuple[float, float] | None:
    ends = item.get("interval")
    if ends is None:
        return None
    low, high = (number(end) for end in ends)
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def _verdict(item: Mapping[str, Any], difference: float, interval: object) -> str:
    if math.isnan(difference):
        return MISSING
    return UNDECIDED if interval is None else str(item.get("verdict") or MISSING)


def _measure_row(
    results: Results, names: Mapping[str, str], measure: Measure, item: Mapping[str, Any]
) -> MeasureRow:
    scale, arm, against = measure.scale, item["arm"], item["against"]
    difference = number(item.get("difference"))
    interval = _interval(item)
    smallest = number(item.get("smallest_detectable"))
    return MeasureRow(
        measure=measure,
        arm=arm,
        arm_label=names[arm],
        against=against,
        against_label=names.get(against, str(against)),
        value=scale.value(number(_statistics(results, arm, measure.name).get("mean"))),
        reference=scale.value(number(_statistics(results, against, measure.name).get("mean"))),
        difference=scale.difference(difference),
        interval=scale.interval(interval),
        smallest=scale.size(smallest),
        verdict=_verdict(item, difference, interval),
        raw_difference=difference,
        raw_interval=interval,
        raw_smallest=smallest,
    )


def _arm_row(
    results: Results,
    arm: Mapping[str, Any],
    known: Mapping[str, Measure],
    rows: Iterable[MeasureRow],
) -> ArmRow:
    name = arm["name"]
    values: dict[str, Statistic] = {}
    for headline in HEADLINES:
        scale = known.get(headline, Measure(headline, headline, "", "higher")).scale
        values[headline] = _statistic(scale, _statistics(results, name, headline))
    details = (f"{arm['attention']} attention" if arm.get("attention") else "", arm.get("heads"))
    return ArmRow(
        name=name,
        label=str(arm.get("label") or name),
        detail=", ".join(str(detail) for detail in details if detail),
        parameters=count_text(arm.get("parameters")),
        body_parameters=count_text(arm.get("parameters_non_embedding")),
        flops=count_text(arm.get("flops_per_token")),
        values=values,
        comparisons={row.measure.name: row for row in rows if row.arm == name},
    )


def _statistic(scale: Scale, item: Mapping[str, Any]) -> Statistic:
    mean, sd = number(item.get("mean")), number(item.get("sd"))
    if math.isnan(mean) or math.isnan(sd):
        return Statistic(scale.value(mean), "", scale.value(mean))
    spread = f"±{_SPACE}{scale.bare(sd)}"
    text = f"{scale.bare(mean)}{_SPACE}{spread}"
    text = _with_unit(text, "%") if scale.unit == "%" else text
    return Statistic(scale.value(mean), spread, text)


def _arm_answer(rows: Sequence[MeasureRow]) -> ArmAnswer:
    counter = Counter(row.verdict for row in rows)
    counts = {verdict: counter[verdict] for verdict in VERDICTS}
    return ArmAnswer(rows[0].arm, rows[0].arm_label, _sentence(rows, counts), counts)


def _sentence(rows: Sequence[MeasureRow], counts: Mapping[str, int]) -> str:
    total = plural(len(rows), "measure")
    parts: list[str] = []
    for verdict in _DECIDED:
        if counts[verdict]:
            of_total = "" if parts else f" of {total}"
            chosen = [row.measure.label for row in rows if row.verdict == verdict]
            parts.append(f"{verdict} on {counts[verdict]}{of_total} ({_names(chosen)})")
    same, unknown = counts[NO_DIFFERENCE], counts[UNDECIDED] + counts[MISSING]
    clauses = [f" is {', '.join(parts)}"] if parts else []
    if same:
        clauses.append(f"on {_where(same, total, parts, unknown)} this run shows no difference")
    if unknown:
        where = _where(unknown, total, parts, same)
        clauses.append(f"on {where} this run cannot tell (no interval or no value)")
    return f"{'' if parts else ': '}{'; '.join(clauses)}."


def _where(count: int, total: str, decided: Sequence[str], others: int) -> str:
    """Names the measures of one clause: all of them, the rest, or some of them."""
    if not decided and not others:
        return total if count == 1 else f"all {total}"
    if others:
        return f"{count} of {total}"
    return f"the other {'one' if count == 1 else count}"


def _names(names: Sequence[str]) -> str:
    between = "; " if any("," in name for name in names) else ", "
    if len(names) <= _NAMES_IN_A_SENTENCE:
        return between.join(names)
    shown = _NAMES_IN_A_SENTENCE - 1
    return f"{between.join(names[:shown])} and {len(names) - shown} more"


def _explanations(results: Results, rows: Sequence[MeasureRow], seeds: str) -> list[str]:
    family = _family(results)
    if all(row.raw_interval is None for row in rows):
        return [
            f"With {seeds} there is no interval, so this run cannot tell a difference between "
            "the arms from chance: run it again with more seeds."
        ]
    sentences = [
        "“No difference” means that the interval of the difference contains zero. It does not "
        "show that the arms are equal, only that this run cannot tell them apart."
    ]
    detectable = _detectable(rows)
    if detectable:
        sentences.append(
            f"With {seeds}, the smallest differences this run could have detected are "
            f"{', '.join(detectable)}; anything smaller goes unseen."
        )
    level = number(family.get("level"))
    if math.isfinite(level):
        sentences.append(
            f"All {family.get('comparisons', len(rows))} intervals hold jointly at "
            f"{level_text(results)}: the chance that even one of them misses the true difference "
            f"is about {_with_unit(f'{100.0 * (1.0 - level):.3g}', '%')}. "
            f"{family.get('method') or ''}".rstrip()
        )
    return sentences


def _detectable(rows: Sequence[MeasureRow]) -> list[str]:
    texts: list[str] = []
    for headline in HEADLINES:
        chosen = [r for r in rows if r.measure.name == headline and not math.isnan(r.raw_smallest)]
        if chosen:
            largest = max(chosen, key=lambda row: row.raw_smallest)
            size = largest.measure.scale.size(largest.raw_smallest, unit=True)
            texts.append(f"{size} in {largest.measure.label}")
    return texts


def _terminal_arms(results: Results) -> list[str]:
    columns = (
        _Column("arm", 23),
        _Column("params", 7, ">"),
        _Column("FLOPs/tok", 9, ">"),
        _Column("tokens/s", 9, ">"),
        _Column("held-out loss", 15, ">"),
        _Column("recall", 12, ">"),
        _Column("answer", 7, ">"),
        _Column("noise", 7, ">"),
    )
    rows = [
        (
            row.label,
            row.parameters,
            row.flops,
            row.values["tokens_per_second"].mean,
            row.values["heldout_loss"].text,
            row.values["recall"].text,
            row.values["attention_answer"].mean,
            row.values["attention_noise"].mean,
        )
        for row in arm_table(results)
    ]
    return _grid(columns, rows)


def _terminal_differences(results: Results) -> list[str]:
    table = measure_table(results)
    shown = [row for row in table if row.measure.name in HEADLINES or row.verdict in _DECIDED]
    if not shown:
        return []
    grid = _grid(_difference_columns(results), [_difference_cells(row) for row in shown])
    lines, below = grid[:2], iter(grid[2:])
    for measure, rows in itertools.groupby(shown, key=lambda row: row.measure):
        unit = f"{measure.scale.difference_unit}, " if measure.scale.difference_unit else ""
        lines.extend(_wrap([f"{measure.label} ({unit}{measure.better} is better)"]))
        lines.extend(next(below) for _ in rows)
    hidden = len(table) - len(shown)
    if hidden:
        lines.append(f"and {plural(hidden, 'comparison')} by cell or depth that decided nothing")
    return lines


def _difference_columns(results: Results) -> Sequence[_Column]:
    return (
        _Column("measure, arm", 34),
        _Column("difference", 12, ">"),
        _Column(f"joint {level_text(results)} interval", 24, ">"),
        _Column("verdict", 13),
    )


def _difference_cells(row: MeasureRow) -> Sequence[str]:
    label = row.arm_label if len(row.arm_label) <= 32 else f"{row.arm_label[:29]}..."
    return f"  {label}", row.difference, row.interval, row.verdict


def _grid(columns: Sequence[_Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lays cells out in columns as narrow as they can be; long cells wrap."""
    fitted = [
        replace(column, width=min(column.width, max(len(cell) for cell in (column.title, *cells))))
        for column, cells in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    lines = _grid_row([column.title for column in fitted], fitted)
    lines.append("  ".join("-" * column.width for column in fitted))
    for row in rows:
        lines.extend(_grid_row(row, fitted))
    return lines


def _grid_row(row: Sequence[str], columns: Sequence[_Column]) -> list[str]:
    cells = [
        textwrap.wrap(text, column.width) or [""] for text, column in zip(row, columns, strict=True)
    ]
    lines: list[str] = []
    for index in range(max(len(cell) for cell in cells)):
        parts = (cell[index] if index < len(cell) else "" for cell in cells)
        padded = (f"{part:{c.align}{c.width}}" for part, c in zip(parts, columns, strict=True))
        lines.append("  ".join(padded).rstrip())
    return lines


def _wrap(paragraphs: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for text in paragraphs:
        indent = "  " if text.startswith("- ") else ""
        lines.extend(textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False))
    return lines


def _plain(line: str) -> str:
    """Keeps what every terminal prints: plain spaces and signs, no control characters."""
    for fancy, plain in ((_SPACE, " "), (_MINUS, "-"), ("“", '"'), ("”", '"')):
        line = line.replace(fancy, plain)
    return "".join(char if char.isprintable() else "?" for char in line)
