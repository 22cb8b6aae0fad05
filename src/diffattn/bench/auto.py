"""`diffattn bench auto`: whether impl="auto" is about as fast as the best implementation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from diffattn.bench import plots, values
from diffattn.bench.sides import DTYPES, FORMS, PASSES, Shape, Side, sides_of
from diffattn.bench.spread import Spread, ratio, spread
from diffattn.bench.timing import timed, wrong_sides
from diffattn.bench.work import Record, Results
from diffattn.errors import UserError
from diffattn.report.tables import Figure, Table

Task = tuple[str, Shape, str, str]
_CASE = "FORM:B,H,G,T,S,HEAD_DIM:DTYPE:PASS"
_SHORT = {"forward": PASSES[0], "both": PASSES[1]}
_CASES = (
    "v1:2,8,8,2048,2048,64:fp32:both",
    "v1:2,8,8,2048,2048,64:fp32:forward",
    "v1:8,4,4,512,512,32:fp32:both",
    "v1:32,2,2,128,128,16:fp32:both",
    "v1:1,1,1,32,32,8:fp32:forward",
    "v1:4,4,4,256,256,128:fp32:both",
    "v1:1,2,2,4096,4096,64:fp32:forward",
    "v1:2,8,8,1024,1024,64:bf16:both",
    "v1:2,8,8,1024,1024,64:bf16:forward",
    "v1:2,8,2,1024,1024,64:fp32:both",
    "v1:1,8,8,1,1024,64:fp32:forward",
    "v1:8,8,2,1,4096,64:bf16:forward",
    "v2:2,16,16,1024,1024,64:fp32:both",
    "v2:1,16,4,1,4096,64:fp32:forward",
    "softmax:2,16,16,1024,1024,64:fp32:both",
    "softmax:1,16,4,1,4096,64:fp32:forward",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `diffattn bench auto`.

    Args:
        cases: "FORM:B,H,G,T,S,HEAD_DIM:DTYPE:PASS": form of attention, batch, output heads, key
            heads, queries, keys, width of a head, fp32 or bf16, forward or both.
        device: "cpu" or "cuda".
        seconds: for each case; every side has five turns at the least.
        tolerance: share by which "auto" may take longer than the best.
    """

    GROWS: ClassVar[tuple[str, ...]] = ("cases",)

    cases: tuple[str, ...] = _CASES
    device: str = "cpu"
    seconds: float = 3.0
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        values.different("cases", self.cases)
        self.tasks()
        values.place("fp32", self.device)
        values.above_zero("seconds", self.seconds)
        values.above_zero("tolerance", self.tolerance)

    def tasks(self) -> Mapping[str, Task]:
        """A task for each case."""
        return {text: _case(text) for text in self.cases}


def _case(text: str) -> Task:
    parts = text.split(":")
    if len(parts) != 4:
        raise UserError(f"cases: expected {_CASE}, got {text!r}")
    form, sizes, dtype, kind = parts
    values.one_of("cases", form, FORMS)
    values.one_of("cases", dtype, DTYPES)
    values.one_of("cases", kind, _SHORT)
    shape = Shape(*values.whole_numbers("cases", sizes, "B,H,G,T,S,HEAD_DIM"))
    if shape.heads % shape.groups:
        raise UserError(f"cases: expected G that divides H, got {text!r}")
    return form, shape, dtype, _SHORT[kind]


def measure(settings: Settings, task: Task) -> Record:
    """Times of "auto" and of every implementation."""
    form, shape, dtype, kind = task
    sides = [Side(form, "auto"), *sides_of((form,), ("all",))]
    return timed(dict.fromkeys(sides, shape), kind, dtype, settings.device, settings.seconds)


def beside_best(record: Record) -> tuple[str, Spread] | None:
    """The fastest named implementation, and the time of "auto" over its time, turn by turn.

    None where "auto" or all of them were left out.
    """
    times = dict(record["seconds"])
    auto = next((times.pop(name) for name in list(times) if name.endswith(", auto")), None)
    if auto is None or not times:
        return None
    best = min(times, key=lambda name: spread(times[name]).middle)
    found = ratio(auto, times[best])
    assert found is not None
    return best, found


def tables(results: Results) -> list[Table]:
    """A row for each case."""
    rows, notes = [], []
    within = 1 + results["settings"]["tolerance"]
    for case, record in results["records"].items():
        found = beside_best(record)
        if found is None:
            rows.append((case, "", "", "", "not measured"))
        else:
            best, beside = found
            rows.append(
                (
                    case,
                    best.split(", ")[1],
                    f"{1e3 * spread(record['seconds'][best]).middle:,.3g}",
                    beside.text(),
                    "yes" if beside.middle <= within else "NO",
                )
            )
        notes += [f"{case}: {s} left out: {why}" for s, why in record["left_out"].items()]
    return [
        Table(
            f"impl='auto' beside the fastest implementation, {results['settings']['device']}",
            ("case", "fastest", "its ms", "auto / fastest", f"within {100 * (within - 1):.3g} %"),
            rows,
            tuple(notes),
        )
    ]


def brief(results: Results) -> Table:
    """The table without what was left out."""
    return tables(results)[0]._replace(notes=())


def figures(results: Results) -> list[Figure]:
    """A point for each case."""
    found = {case: beside_best(record) for case, record in results["records"].items()}
    rows = {case: beside[1] for case, beside in found.items() if beside is not None}
    return [
        Figure(
            "impl='auto' beside the fastest implementation",
            plots.ranges("auto", "Time of auto over the fastest", {"": rows}, "ratio of times"),
            "Points are medians over turns, lines the middle half of the turns; at 1 'auto' takes "
            "as long as the fastest implementation that was named.",
        )
    ]


def problems(results: Results) -> list[str]:
    """What makes the command fail: a case outside of the tolerance, a side that is wrong."""
    tolerance = results["settings"]["tolerance"]
    lines = wrong_sides(results)
    for case, record in results["records"].items():
        found = beside_best(record)
        if found is None:
            lines.append(f"{case}: impl='auto' was not measured")
        elif not found[1].middle <= 1 + tolerance:
            lines.append(
                f"{case}: impl='auto' takes {found[1].text()} times as long as {found[0]}, "
                f"expected {1 + tolerance:.3g} or less"
            )
    return lines
