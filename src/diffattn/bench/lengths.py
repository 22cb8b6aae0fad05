"""`diffattn bench lengths`: time and memory of a forward and backward pass over length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from diffattn.bench import plots, values
from diffattn.bench.memory import peak_memory
from diffattn.bench.sides import BASE, PASSES, of_transformer, sides_of
from diffattn.bench.spread import spread
from diffattn.bench.timing import ratios, timed, wrong_sides
from diffattn.bench.work import Record, Results
from diffattn.report.numbers import bytes_text
from diffattn.report.tables import Figure, Table


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `diffattn bench lengths`.

    Args:
        lengths: tokens.
        batch: sequences.
        pairs: of heads of the Transformer.
        width: of a head.
        dtype: of the operands, one of DTYPES.
        device: "cpu" or "cuda".
        impl: implementations of V1; "all" means all that there are.
        seconds: for the times of each length; every side has five turns at the least.
    """

    GROWS: ClassVar[tuple[str, ...]] = ("lengths",)

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    batch: int = 1
    pairs: int = 1
    width: int = 64
    dtype: str = "fp32"
    device: str = "cpu"
    impl: tuple[str, ...] = ("all",)
    seconds: float = 4.0

    def __post_init__(self) -> None:
        values.different("lengths", self.lengths)
        for length in self.lengths:
            values.above_zero("lengths", length)
        for name in ("batch", "pairs", "width", "seconds"):
            values.above_zero(name, getattr(self, name))
        values.place(self.dtype, self.device)
        values.implementations(self.impl)

    def tasks(self) -> Mapping[str, int]:
        """A task for each length."""
        return {f"{length} tokens": length for length in self.lengths}


def measure(settings: Settings, length: int) -> Record:
    """Times and memory of every side at a length."""
    s = settings
    shapes = {
        side: of_transformer(side.form, s.batch, s.pairs, length, s.width)
        for side in (BASE, *sides_of(("v1",), s.impl))
    }
    record = timed(shapes, PASSES[1], s.dtype, s.device, s.seconds)
    record["memory"] = {}
    for side, shape in shapes.items():
        if side.name in record["seconds"]:
            try:
                record["memory"][side.name] = peak_memory(side, shape, s.dtype, s.device)
            except NotImplementedError as error:
                record["left_out"][side.name] = str(error)
    return record


def _tokens(task: str) -> int:
    return int(task.removesuffix(" tokens"))


def tables(results: Results) -> list[Table]:
    """A row for each length and side."""
    rows, notes = [], []
    for task, record in results["records"].items():
        for side, (to_torch, _) in ratios(record).items():
            times = record["seconds"][side]
            rows.append(
                (
                    f"{_tokens(task):,} tokens: {side}",
                    f"{1e3 * spread(times).middle:,.3g}",
                    "" if to_torch is None else to_torch.text(),
                    bytes_text(record["memory"].get(side)),
                    f"{record['errors'][side]:.2f}",
                )
            )
        notes += [f"{task}: {s} left out: {why}" for s, why in record["left_out"].items()]
        notes += [f"{task}: {s} is wrong: {why}" for s, why in record["wrong"].items()]
    s = results["settings"]
    return [
        Table(
            f"Forward + backward over length, batch {s['batch']}, {2 * s['pairs']} heads of "
            f"{s['width']}, {s['dtype']}, {s['device']}",
            ("side", "ms", "x torch's softmax", "peak memory", "error x torch's"),
            rows,
            tuple(notes),
        )
    ]


def figures(results: Results) -> list[Figure]:
    """Time and memory over length."""
    panels = {"time, ms": {}, "peak memory, MiB": {}}
    for task, record in results["records"].items():
        for side, times in record["seconds"].items():
            point = _tokens(task), 1e3 * spread(times).middle
            panels["time, ms"].setdefault(side, []).append(point)
        for side, size in record["memory"].items():
            if size:
                point = _tokens(task), size / 2**20
                panels["peak memory, MiB"].setdefault(side, []).append(point)
    return [
        Figure(
            "Time and memory over length",
            plots.over_length("lengths", "Time and memory over length", panels),
            "One forward and backward pass. Memory is what the pass adds at its highest to a fresh "
            "process that holds its inputs: outputs, gradients and all between.",
        )
    ]


def brief(results: Results) -> Table:
    """A row for each length: torch's softmax beside the fastest V1."""
    rows = []
    for task, record in results["records"].items():
        times = {s: spread(taken).middle for s, taken in record["seconds"].items()}
        best = min((s for s in times if s != BASE.name), key=times.__getitem__, default=None)
        cells = [
            f"{1e3 * times[s]:,.3g} ms, {bytes_text(record['memory'].get(s))}" if s in times else ""
            for s in (BASE.name, best)
        ]
        impl = f" ({best.split(', ')[1]})" if best else ""
        rows.append((f"{_tokens(task):,}", cells[0], f"{cells[1]}{impl}"))
    return tables(results)[0]._replace(
        columns=("tokens", "torch's softmax", "fastest V1"), rows=rows, notes=()
    )


problems = wrong_sides
