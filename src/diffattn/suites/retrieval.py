"""Multi-needle retrieval: numbers of cities in a long text, asked for at its end."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from diffattn.data.needle_prompts import PLACED, NeedlePrompt, Placed, needle_prompts
from diffattn.errors import UserError
from diffattn.evaluation.continuations import ReadContext
from diffattn.evaluation.proportions import proportion_interval
from diffattn.report.tables import Figure, Table
from diffattn.suites import plots
from diffattn.suites.claim import Claim, Measure
from diffattn.suites.records import Record
from diffattn.suites.subject import Loaded
from diffattn.suites.suite import Measured
from diffattn.suites.text import Text

ABOUT = "numbers of cities hidden in a text: found, confused with another, or missed"
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the suite `retrieval`.

    Args:
        cells: "NxR": needles in the text, and how many of them are asked for.
        lengths: tokens of a prompt with its answer.
        depths: of the queried needle, 0 the start and 1 the end.
        samples: prompts for each cell, length and depth.
        placed: which needles lie at the depth: "first_query", "all_queries" or "random".
        seed: of cities, numbers and places.
    """

    cells: tuple[str, ...] = ("1x1", "2x2", "4x2", "6x2")
    lengths: tuple[int, ...] = (1024,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 4
    placed: str = "first_query"
    seed: int = 0

    def __post_init__(self) -> None:
        self.pairs()
        if self.samples < 1:
            raise UserError(f"retrieval.samples: expected at least 1, got {self.samples}")
        if self.placed not in PLACED:
            raise UserError(
                f"retrieval.placed: expected one of {', '.join(PLACED)}, got {self.placed!r}"
            )
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UserError(f"retrieval.depths: expected shares from 0 to 1, got {depth:g}")
        for length in self.lengths:
            if length < 1:
                raise UserError(f"retrieval.lengths: expected numbers above 0, got {length}")

    def pairs(self) -> list[tuple[int, int]]:
        """Each cell as (N, R)."""
        found = []
        for cell in self.cells:
            match = re.fullmatch(r"(\d+)x(\d+)", cell)
            if match is None or not 1 <= int(match[2]) <= int(match[1]):
                raise UserError(
                    f"retrieval.cells: expected NxR with R up to N, as in 4x2, got {cell!r}"
                )
            found.append((int(match[1]), int(match[2])))
        return found


def items(settings: Settings, loaded: Loaded, text: Text) -> list[NeedlePrompt]:
    """Every prompt of every cell and length.

    Raises:
        UserError: a length is beyond the model's context, or too short for its needles.
    """
    found = []
    for length in settings.lengths:
        if loaded.limit is not None and length > loaded.limit:
            raise UserError(
                f"retrieval.lengths: expected at most {loaded.limit:,}, the model's context, got "
                f"{length:,}"
            )
        for needles, queries in settings.pairs():
            found += needle_prompts(
                text.documents,
                loaded.tokenizer,
                length=length,
                needles=needles,
                queries=queries,
                depths=settings.depths,
                samples=settings.samples,
                placed=cast(Placed, settings.placed),
                seed=settings.seed,
            )
    return found


def measure(settings: Settings, loaded: Loaded, items: Sequence[NeedlePrompt]) -> Iterator[Record]:
    """Three scorers on one reading of each context.

    Free generation: greedy, up to the end of the line. A queried number that stands in it is found;
    a number of a needle that was not asked for is a swap; a queried number that is not there is
    missed. Forced choice: of the N numbers of the text the likeliest one behind the question for
    one city. Log-probability: of the right one there, in nats.
    """
    for item in items:
        yield _measured(loaded, item)


def _measured(loaded: Loaded, item: NeedlePrompt) -> Record:
    tokenizer, context = loaded.tokenizer, ReadContext(loaded.model, item.context)
    numbers, queried = dict(item.needles), item.together.cities
    asked = {numbers[city] for city in queried}
    others = set(numbers.values()) - asked
    most = len(queried) * (max(map(len, item.together.answers)) + 3)
    said = context.greedy(
        item.together.prompt, most, _stops(tokenizer), draft=item.together.answers[0]
    )
    answer = tokenizer.decode(said)
    line = answer.split("\n")[0]
    given = set(_NUMBER.findall(line))
    found = asked & given
    ranks = [context.scores(alone.prompt, alone.answers) for alone in item.alone]
    values: dict[str, float | None] = {
        "found": len(found) / len(asked),
        "all_found": float(found == asked),
        "swapped": len(others & given) / len(asked) if others else None,
        "missed": 1 - len(found) / len(asked),
        "chosen": float(np.mean([scores[0] == max(scores) for scores in ranks])),
        "nats": float(-np.mean([scores[0] for scores in ranks])),
    }
    cut = len(said) >= most and "\n" not in answer and found != asked
    finite = all(np.isfinite(score) for scores in ranks for score in scores)
    return {
        "id": item.id,
        "cluster": None,
        "values": values if finite else dict.fromkeys(values),
        "flags": ["answer cut off"] * cut + ["scores are not finite"] * (not finite),
        "answer": answer,
        "needles": [list(needle) for needle in item.needles],
        "asked": list(queried),
        "spans": [list(span) for span in item.spans],
        "length": len(item.prompt),
        "depth": item.depth,
        "found_at": item.found_at,
        "cell": item.id.split("-L")[0],
    }


def _stops(tokenizer: Any) -> list[int]:
    ids = tokenizer("a\n", add_special_tokens=False)["input_ids"][1:]
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return [*ends, *(ids if len(ids) == 1 else [])]


def claims(settings: Settings) -> list[Claim]:
    """More numbers found, fewer confused, more chosen where choices are given."""
    needles, _ = max(settings.pairs())
    return [
        Claim(
            name="retrieval",
            text="More of the numbers that are asked for are given.",
            measure=Measure(
                name="found", label="numbers found", unit="share", better="higher", margin=0.02
            ),
            paper="0.85 against 0.55 with 6 needles and 2 questions in 4K tokens "
            "(arXiv 2410.05258, Table 2)",
            content_free=0.0,
            strategy="a number that is not in the text",
        ),
        Claim(
            name="retrieval-swaps",
            text="Numbers of other cities are given less often.",
            measure=Measure(
                name="swapped",
                label="numbers of other needles",
                unit="share",
                better="lower",
                margin=0.02,
            ),
        ),
        Claim(
            name="retrieval-choice",
            text="The right one of the numbers in the text is the likeliest more often.",
            measure=Measure(
                name="chosen", label="forced choice", unit="share", better="higher", margin=0.02
            ),
            content_free=_guess(settings),
            strategy=f"one of the numbers in the text at random, 1 in N, N up to {needles}",
        ),
        Claim(
            name="retrieval-nats",
            text="The right number is likelier.",
            measure=Measure(
                name="nats",
                label="-log p of the right number",
                unit="nats",
                better="lower",
                margin=0.05,
            ),
            same_tokens=True,
        ),
    ]


def _guess(settings: Settings) -> float:
    """Mean of 1/N over the items."""
    return float(np.mean([1 / needles for needles, _ in settings.pairs()]))


def tables(settings: Settings, measured: Measured) -> list[Table]:
    """By cell, then by depth."""
    return [
        _table("By needles and questions", measured, "cell"),
        _table("By depth of the needle", measured, "depth"),
    ]


def _table(title: str, measured: Measured, key: str) -> Table:
    rows = []
    for name, seeds in measured.items():
        records = [record for found in seeds for record in found.values()]
        for group in dict.fromkeys(record[key] for record in records):
            mine = [record for record in records if record[key] == group]
            right = [r["values"]["found"] for r in mine if r["values"]["found"] is not None]
            low, high = proportion_interval(sum(right), len(right)) if right else (0.0, 1.0)
            rows.append(
                (
                    f"{name}, {'anywhere' if group is None else group}",
                    f"{len(mine)}",
                    f"{_mean(mine, 'found')} ({100 * low:.0f} to {100 * high:.0f})",
                    *(_mean(mine, key) for key in ("all_found", "swapped", "missed", "chosen")),
                    f"{sum(bool(record['flags']) for record in mine)}",
                )
            )
    return Table(
        title,
        (
            *("model", "prompts", "found, % (95 % of prompts like these)", "all, %", "swapped, %"),
            *("missed, %", "forced choice, %", "flagged"),
        ),
        rows,
    )


def _mean(records: Sequence[Record], key: str) -> str:
    values = [r["values"][key] for r in records if r["values"][key] is not None]
    return f"{100 * np.mean(values):.1f}" if values else "n/a"


def figures(settings: Settings, measured: Measured) -> list[Figure]:
    """Found, chosen and swapped over the depth of the needle."""
    if settings.placed == "random" or len(settings.depths) < 2:
        return []
    panels = {
        "found": _over_depth(measured, "found"),
        "forced choice": _over_depth(measured, "chosen"),
        "swapped": _over_depth(measured, "swapped"),
    }
    return [
        Figure(
            "Retrieval over depth",
            plots.lines(
                "retrieval-depth",
                "Retrieval over depth",
                {title: lines for title, lines in panels.items() if lines},
                across="depth of the needle",
                up="share",
                logarithmic=False,
            ),
            "Means over cells, lengths, samples and seeds. Swapped: a number of a needle that was "
            "not asked for was given.",
        )
    ]


def _over_depth(measured: Measured, key: str) -> Mapping[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for name, seeds in measured.items():
        records = [record for of_seed in seeds for record in of_seed.values()]
        for depth in sorted({record["depth"] for record in records}):
            values = [r["values"][key] for r in records if r["depth"] == depth]
            kept = [value for value in values if value is not None]
            if kept:
                found.setdefault(name, []).append((depth, float(np.mean(kept))))
    return found
