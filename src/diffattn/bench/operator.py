"""`diffattn bench operator`: times of attention operators of one Transformer's width."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from diffattn.bench import plots, values
from diffattn.bench.sides import BASE, FORMS, PASSES, of_transformer, sides_of
from diffattn.bench.spread import spread
from diffattn.bench.timing import ratios, timed, wrong_sides
from diffattn.bench.work import Record, Results
from diffattn.errors import UserError
from diffattn.report.tables import Figure, Table

Task = tuple[tuple[int, ...], str]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `diffattn bench operator`.

    Args:
        shapes: "B,PAIRS,TOKENS,HEAD_DIM" of a Transformer with 2 PAIRS heads; ":forward" after
            it leaves out the backward pass.
        dtype: of the operands, one of DTYPES.
        device: "cpu" or "cuda".
        impl: implementations; "all" means all that there are.
        seconds: for each shape and pass; every side has five turns at the least.
    """

    GROWS: ClassVar[tuple[str, ...]] = ("shapes",)

    shapes: tuple[str, ...] = ("2,8,2048,64", "8,4,512,32", "1,8,4096,64:forward", "1,8,8192,64")
    dtype: str = "fp32"
    device: str = "cpu"
    impl: tuple[str, ...] = ("all",)
    seconds: float = 8.0

    def __post_init__(self) -> None:
        values.different("shapes", self.shapes)
        self.tasks()
        values.place(self.dtype, self.device)
        values.implementations(self.impl)
        values.above_zero("seconds", self.seconds)

    def tasks(self) -> Mapping[str, Task]:
        """A task for each shape and pass."""
        found: dict[str, Task] = {}
        for text in self.shapes:
            sizes, _, only = text.partition(":")
            if only not in ("", PASSES[0]):
                raise UserError(f"shapes: expected nothing or forward after ':', got {text!r}")
            numbers = values.whole_numbers("shapes", sizes, "B,PAIRS,TOKENS,HEAD_DIM")
            for kind in PASSES[:1] if only else PASSES:
                found[f"{sizes} {kind}"] = numbers, kind
        return found


def measure(settings: Settings, task: Task) -> Record:
    """Times of every side."""
    (batch, pairs, tokens, width), kind = task
    sides = [BASE, *sides_of(FORMS, settings.impl)]
    shapes = {side: of_transformer(side.form, batch, pairs, tokens, width) for side in sides}
    return timed(shapes, kind, settings.dtype, settings.device, settings.seconds)


def tables(results: Results) -> list[Table]:
    """A table for each shape and pass."""
    return [_table(name, record, results) for name, record in results["records"].items()]


def _table(name: str, record: Record, results: Results) -> Table:
    settings = results["settings"]
    rows = [
        (
            side,
            f"{1e3 * spread(record['seconds'][side]).middle:,.3g}",
            *("" if found is None else found.text() for found in both),
            f"{record['errors'][side]:.2f}",
        )
        for side, both in ratios(record).items()
    ]
    rows += [(side, "wrong", "", "", "") for side in record["wrong"]]
    return Table(
        f"{title(name)}, {settings['dtype']}, {settings['device']}",
        ("side", "ms", "x torch's softmax", "x softmax, same impl", "error x torch's"),
        rows,
        (
            *(f"{side} left out: {reason}" for side, reason in record["left_out"].items()),
            *(f"{side} is wrong: {reason}" for side, reason in record["wrong"].items()),
        ),
    )


def title(name: str) -> str:
    """A task in words."""
    sizes, _, kind = name.partition(" ")
    batch, pairs, tokens, width = (int(size) for size in sizes.split(","))
    return f"batch {batch}, {2 * pairs} heads of {width}, {tokens:,} tokens, {kind}"


def brief(results: Results) -> Table:
    """A row for each shape and pass: the fastest implementation of every form."""
    rows = []
    for name, record in results["records"].items():
        found = {side: both[0] for side, both in ratios(record).items() if side != BASE.name}
        cells = []
        for form in FORMS:
            of_form = {s: r for s, r in found.items() if r and s.startswith(f"{form},")}
            best = min(of_form, key=lambda side: of_form[side].middle, default=None)
            cells.append(f"{of_form[best].middle:.2f} ({best.split(', ')[1]})" if best else "")
        rows.append((title(name), *cells))
    settings = results["settings"]
    return Table(
        f"Time over that of torch's softmax attention of equal width, {settings['dtype']}, "
        f"{settings['device']}; the fastest implementation of each",
        ("shape", "softmax", "V1", "V2"),
        rows,
    )


def figures(results: Results) -> list[Figure]:
    """A panel for each shape and pass."""
    panels = {
        title(name): {
            side: both[0]
            for side, both in ratios(record).items()
            if side != BASE.name and both[0] is not None
        }
        for name, record in results["records"].items()
    }
    return [
        Figure(
            "Time beside torch's softmax attention",
            plots.ranges("ratios", "Time over torch's softmax attention", panels, "ratio of times"),
            "Points are medians over turns, lines the middle half of the turns; left of 1 is "
            "faster than torch's softmax attention of equal width.",
        )
    ]


problems = wrong_sides
