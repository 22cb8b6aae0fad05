"""Many-shot classification: accuracy, and how much it moves with the order of demonstrations."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from diffattn.data.classification import (
    LabelledSplit,
    field_names,
    labelled_texts,
    split_labelled,
)
from diffattn.data.shot_order import ORDERS, order_shots
from diffattn.data.shot_prompts import SEPARATOR, ShotPrompts, shortest_prefixes
from diffattn.errors import UserError
from diffattn.evaluation.continuations import ReadContext
from diffattn.evaluation.label_choice import LabelChoice
from diffattn.evaluation.order_spread import order_spread, pair_agreement
from diffattn.report.tables import Figure, Table
from diffattn.suites import plots
from diffattn.suites.claim import Claim, Measure
from diffattn.suites.records import Record
from diffattn.suites.subject import Loaded
from diffattn.suites.suite import Measured
from diffattn.suites.text import Text

ABOUT = "many-shot classification, and how much it moves with the order of demonstrations"
TEMPLATE = f"{{name}}: {{text}}\n{{label_name}}: {{label}}{SEPARATOR}"
_PAPER = "arXiv 2410.05258, section 3.4"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the suite `icl`.

    Args:
        data: "banking77", "clinc150", or a path of text and label, see `labelled_texts`.
        classes: that are drawn; None means all.
        shots: demonstrations.
        tests: test items, before the longest 1 % of texts are left out.
        kinds: of orders: "random", "alternating", "blocked".
        orders: of each kind.
        fewer: whether demonstrations that do not fit are left out, with a flag, instead of an
            error.
        whole: whether whole labels are scored too.
        seed: of the draws.
    """

    data: str = "banking77"
    classes: int | None = 6
    shots: tuple[int, ...] = (10, 25)
    tests: int = 100
    kinds: tuple[str, ...] = ORDERS
    orders: int = 5
    fewer: bool = False
    whole: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.orders < 2:
            raise UserError(f"icl.orders: expected at least 2, got {self.orders}")
        for name in ("shots", "kinds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"icl.{name}: expected values that differ, got {values}")
        for kind in self.kinds:
            if kind not in ORDERS:
                raise UserError(f"icl.kinds: expected some of {', '.join(ORDERS)}, got {kind!r}")
        if min(self.shots) < 1:
            raise UserError(f"icl.shots: expected numbers above 0, got {min(self.shots)}")

    def split(self) -> LabelledSplit:
        """Demonstrations and test items."""
        return split_labelled(
            labelled_texts(self.data), tests=self.tests, classes=self.classes, seed=self.seed
        )


@dataclass(frozen=True)
class ShotItem:
    """A test item behind the same demonstrations in all orders of a kind.

    Args:
        id: kind, shots and number of the test item.
        cluster: the test item.
        group: kind and shots asked for.
        used: shots that fit.
        contexts: tokens of the demonstrations in each order, shared by all items of a group.
        question: tokens.
        label: the right one.
        shown: whether a demonstration has it.
        prompt: tokens of the first order and the question; of later items of a group the question
            alone.
    """

    id: str
    cluster: str
    group: tuple[str, int]
    used: int
    contexts: Sequence[Sequence[int]] = field(repr=False)
    question: Sequence[int]
    label: str
    shown: bool
    prompt: Sequence[int] = field(repr=False)


def items(settings: Settings, loaded: Loaded, text: Text) -> list[ShotItem]:
    """Every test item with every number of shots and kind of order; `text` is not read.

    Raises:
        UserError: the demonstrations do not fit, or there are not so many.
    """
    split = settings.split()
    prompts = _prompts(settings, loaded, split)
    questions = [prompts.question(query) for query, _ in split.tests]
    room = max(map(len, questions)) + max(map(len, prompts.labels.values()))
    found = []
    for kind in settings.kinds:
        for shots in settings.shots:
            used = _fitting(settings, loaded, split, prompts, shots, room)
            lists = [
                order_shots(split.shots, used, kind=kind, order=n, seed=settings.seed)
                for n in range(settings.orders)
            ]
            contexts = [prompts.context(shown) for shown in lists]
            known = {label for _, label in lists[0]}
            every = [token for context in contexts for token in context]
            for n, ((_, label), question) in enumerate(zip(split.tests, questions, strict=True)):
                found.append(
                    ShotItem(
                        id=f"{kind}-{shots}-{n}",
                        cluster=str(n),
                        group=(kind, shots),
                        used=used,
                        contexts=contexts,
                        question=question,
                        label=label,
                        shown=label in known,
                        prompt=question if n else [*every, *question],
                    )
                )
    return found


def _prompts(settings: Settings, loaded: Loaded, split: LabelledSplit) -> ShotPrompts:
    return ShotPrompts(loaded.tokenizer, field_names(settings.data), split.labels)


def _fitting(
    settings: Settings,
    loaded: Loaded,
    split: LabelledSplit,
    prompts: ShotPrompts,
    shots: int,
    room: int,
) -> int:
    """How many of so many demonstrations fit; their tokens do not depend on their order."""
    if shots > len(split.shots):
        raise UserError(f"icl.shots: expected at most {len(split.shots):,}, got {shots:,}")
    if loaded.limit is None:
        return shots
    head = len(prompts.context([]))
    sizes = [len(prompts.context([shot])) - head for shot in split.shots[:shots]]
    ends = head + room + np.cumsum(sizes)
    used = int(np.searchsorted(ends, loaded.limit, side="right"))
    if used < shots and (not settings.fewer or used == 0):
        raise UserError(
            f"icl.shots: {shots:,} are {int(ends[-1]):,} tokens with a question, expected at most "
            f"{loaded.limit:,}, the model's context; icl.fewer=true takes those that fit"
        )
    return used


def measure(settings: Settings, loaded: Loaded, items: Sequence[ShotItem]) -> Iterator[Record]:
    """Answers of each test item in every order; an order's demonstrations are read once.

    The records of a group come when its last order is done.
    """
    prompts = _prompts(settings, loaded, settings.split())
    prefixes = shortest_prefixes(prompts.labels)
    for group in dict.fromkeys(item.group for item in items):
        mine = [item for item in items if item.group == group]
        started = time.perf_counter()
        answers = [
            _answers(loaded, context, mine, prompts, prefixes, whole=settings.whole)
            for context in mine[0].contexts
        ]
        seconds = time.perf_counter() - started
        for n, item in enumerate(mine):
            yield {
                **_record(item, [found[n] for found in answers]),
                "seconds_of_group": round(seconds, 3),
            }


def _answers(
    loaded: Loaded,
    context: Sequence[int],
    items: Sequence[ShotItem],
    prompts: ShotPrompts,
    prefixes: dict[str, tuple[int, ...]],
    *,
    whole: bool,
) -> list[tuple[str, str | None, float]]:
    """Constrained answer, likeliest whole label and nats of the right one, of each item."""
    read = ReadContext(loaded.model, context)
    found = []
    for item in items:
        with LabelChoice(read, item.question) as choice:
            nats = -choice.score(prompts.labels[item.label])
            if not np.isfinite(nats):
                found.append(("", None, nats))
                continue
            likeliest = choice.likeliest(prompts.labels) if whole else None
            found.append((choice.constrained(prefixes), likeliest, nats))
    return found


def _record(item: ShotItem, answers: Sequence[tuple[str, str | None, float]]) -> Record:
    said = [answer for answer, *_ in answers]
    whole = [answer for _, answer, _ in answers if answer is not None]
    values: dict[str, float | None] = {
        "right": float(np.mean([answer == item.label for answer in said])),
        "agreement": pair_agreement(said),
        "right_whole": float(np.mean([a == item.label for a in whole])) if whole else None,
        "nats": float(np.mean([nats for *_, nats in answers])),
    }
    finite = all(np.isfinite(nats) for *_, nats in answers)
    kind, shots = item.group
    return {
        "id": item.id,
        "cluster": item.cluster,
        "values": values if finite else dict.fromkeys(values),
        "flags": [f"{item.used} of {shots} shots fit"] * (item.used < shots)
        + ["scores are not finite"] * (not finite),
        "kind": kind,
        "shots": shots,
        "used": item.used,
        "label": item.label,
        "shown": item.shown,
        "answers": said,
    }


def claims(settings: Settings) -> list[Claim]:
    """More right answers, and answers that the order changes less."""
    majority = settings.split().majority
    right = Measure(name="right", label="right labels", unit="share", better="higher", margin=0.02)
    strategy = "the most frequent label of the test items"
    return [
        Claim(
            name="icl",
            text="More labels are right behind many demonstrations.",
            measure=right,
            paper=f"5.2 to 21.6 points more on average over four sets ({_PAPER})",
            content_free=majority,
            strategy=strategy,
        ),
        Claim(
            name="icl-order",
            text="Answers change less with the order of demonstrations.",
            measure=replace(right, name="agreement", label="agreement of two orders"),
            paper="best minus worst order of TREC 4.0 against 19.0 points, alternating by class "
            f"13.4 against 56.7 ({_PAPER})",
        ),
        *(
            [
                Claim(
                    name="icl-whole",
                    text="The right label is the likeliest whole label more often.",
                    measure=replace(right, name="right_whole", label="right whole labels"),
                    content_free=majority,
                    strategy=strategy,
                )
            ]
            if settings.whole
            else []
        ),
        Claim(
            name="icl-nats",
            text="The right label is likelier.",
            measure=Measure(
                name="nats",
                label="-log p of the right label",
                unit="nats",
                better="lower",
                margin=0.05,
            ),
            same_tokens=True,
        ),
    ]


def tables(settings: Settings, measured: Measured) -> list[Table]:
    """Accuracy and its spread over orders, for each model, kind and number of shots."""
    rows = []
    for name, seeds in measured.items():
        for seed, found in enumerate(seeds):
            for kind, shots, records in _groups(settings, found.values()):
                label = f"{name}, seed {seed}" if len(seeds) > 1 else name
                rows.append((label, kind, f"{shots:,}", *_spread_row(records)))
    return [
        Table(
            "Accuracy over orders of the same demonstrations",
            (
                *("model", "orders", "shots", "items", "mean, %", "worst, %", "best - worst"),
                *("SD", "floor, new items", "floor, same items", "agreement, %", "flagged"),
            ),
            rows,
            (
                "Floors: the best - worst to expect from chance alone, if every order saw other "
                "test items (binomial), or changed each answer of the same items by itself.",
                "Agreement: share of pairs of orders with the same answer, right or wrong.",
            ),
        )
    ]


def _groups(
    settings: Settings, records: Iterable[Record]
) -> Iterator[tuple[str, int, list[Record]]]:
    every = list(records)
    for kind in settings.kinds:
        for shots in settings.shots:
            yield kind, shots, [r for r in every if (r["kind"], r["shots"]) == (kind, shots)]


def _spread_row(records: Sequence[Record]) -> list[str]:
    kept = [record for record in records if record["values"]["right"] is not None]
    flagged = f"{sum(bool(record['flags']) for record in records)}"
    if not kept:
        return ["0", *["n/a"] * 7, flagged]
    spread = order_spread(
        np.array([[answer == r["label"] for answer in r["answers"]] for r in kept]).T
    )
    agreement = float(np.mean([record["values"]["agreement"] for record in kept]))
    shares = (spread.mean, spread.worst, spread.margin, spread.deviation)
    return [
        f"{len(kept)}",
        *(f"{100 * value:.1f}" for value in (*shares, spread.floor, spread.floor_same)),
        f"{100 * agreement:.1f}",
        flagged,
    ]


def figures(settings: Settings, measured: Measured) -> list[Figure]:
    """Accuracy over shots, a panel for each kind of order."""
    if len(settings.shots) < 2:
        return []
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, seeds in measured.items():
        every = [record for found in seeds for record in found.values()]
        for kind, shots, records in _groups(settings, every):
            right = [r["values"]["right"] for r in records if r["values"]["right"] is not None]
            if right:
                points = panels.setdefault(kind, {}).setdefault(name, [])
                points.append((shots, float(np.mean(right))))
    if not panels:
        return []
    return [
        Figure(
            "Accuracy over shots",
            plots.lines(
                "icl-shots",
                "Accuracy over shots",
                panels,
                across="demonstrations",
                up="share of right labels",
            ),
            "Means over orders, test items and seeds.",
        )
    ]
