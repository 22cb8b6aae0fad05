"""Held-out loss: in bits per byte, by position, and where a pair of tokens comes again."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from diffattn.data import starts_with_bos
from diffattn.data.repeats import PairCounts, frequency_cut, repeated_pairs
from diffattn.errors import UserError
from diffattn.evaluation.batches import in_batches, rows_within
from diffattn.evaluation.token_losses import batch_token_losses
from diffattn.report.tables import Figure, Table
from diffattn.suites import plots
from diffattn.suites.claim import Claim, Measure
from diffattn.suites.records import Record
from diffattn.suites.subject import Loaded
from diffattn.suites.suite import Measured
from diffattn.suites.text import Text

ABOUT = "held-out loss, by position, and of tokens that complete a repeated pair"
TEMPLATE = ""
_FIRST_BIN = 256
_PAPER_SHARE = 0.078  # of AR-Hit tokens, by the rows of the paper's Table 6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the suite `loss`.

    Args:
        characters: of a window of text; documents that are shorter are left out.
        windows: of a document at most, one behind the other from its start.
        chunk: tokens that go through the model at a time.
        share: of tokens that count as AR-Hit.
    """

    characters: int = 4096
    windows: int = 4
    chunk: int = 512
    share: float = _PAPER_SHARE

    def __post_init__(self) -> None:
        if self.characters < 2 * _FIRST_BIN:
            raise UserError(
                f"loss.characters: expected at least {2 * _FIRST_BIN}, got {self.characters}"
            )
        for name in ("windows", "chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"loss.{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.share < 1:
            raise UserError(f"loss.share: expected a share between 0 and 1, got {self.share:g}")

    @property
    def bins(self) -> list[tuple[int, int]]:
        """Characters [from, to) of each bin: the first, then twice as many each."""
        ends = [0, _FIRST_BIN]
        while ends[-1] < self.characters:
            ends.append(min(2 * ends[-1], self.characters))
        return list(pairwise(ends))


@dataclass(frozen=True)
class Window:
    """A window of text as a model reads it.

    Args:
        id: document and number of the window.
        cluster: the document.
        prompt: [L] tokens, the first of which is given.
        starts: [L - 1] characters before each other token.
        sizes: [L - 1] UTF-8 bytes of each other token.
        hits: [L - 1] whether it is an AR-Hit.
    """

    id: str
    cluster: str
    prompt: Sequence[int]
    starts: np.ndarray
    sizes: np.ndarray
    hits: np.ndarray


def items(settings: Settings, loaded: Loaded, text: Text) -> list[Window]:
    """The windows of every document that is long enough.

    Raises:
        UserError: no document is, the tokenizer does not tell where tokens lie, or a window is
            longer than the model's context.
    """
    tokenizer = loaded.tokenizer
    if not tokenizer.is_fast:
        raise UserError("tokenizer: expected a fast one, which knows the places of its tokens")
    head = [tokenizer.bos_token_id] if starts_with_bos(tokenizer) else []
    cut = settings.characters
    pieces = [
        (document.name, number, document.text[number * cut : (number + 1) * cut])
        for document in text.documents
        for number in range(min(settings.windows, len(document.text) // cut))
    ]
    if not pieces:
        longest = max(len(document.text) for document in text.documents)
        raise UserError(
            f"loss.characters: expected at most {longest:,}, the longest document of "
            f"{text.source}, got {cut:,}"
        )
    counts = PairCounts.of(
        tokenizer([d.text for d in text.training], add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
    )
    encoded = [
        tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for *_, piece in pieces
    ]
    repeats = [repeated_pairs(one["input_ids"], counts) for one in encoded]
    most = frequency_cut(repeats, settings.share)
    found = []
    for (name, number, piece), one, repeated in zip(pieces, encoded, repeats, strict=True):
        ids = head + one["input_ids"]
        if loaded.limit is not None and len(ids) > loaded.limit:
            raise UserError(
                f"loss.characters: {cut:,} are {len(ids):,} tokens, expected at most "
                f"{loaded.limit:,}, the model's context"
            )
        known = 1 - len(head)  # without BOS the first token is given
        starts = np.array([start for start, _ in one["offset_mapping"]])[known:]
        hits = (repeated >= 0) & (repeated <= most)
        bytes_before = np.cumsum([0, *(len(character.encode()) for character in piece)])
        ends = bytes_before[[*starts, len(piece)]]
        found.append(
            Window(
                id=f"{name}/{number}",
                cluster=name,
                prompt=ids,
                starts=starts,
                sizes=np.diff(ends),
                hits=np.concatenate([np.zeros(len(head), dtype=bool), hits]),
            )
        )
    return found


def measure(settings: Settings, loaded: Loaded, items: Sequence[Window]) -> Iterator[Record]:
    """Values of each window: bits per byte, by bins, and nats of AR-Hit and other tokens."""
    if not items:
        return
    longest = max(items, key=lambda window: len(window.prompt)).prompt

    def losses(windows: Sequence[Window]) -> list[np.ndarray]:
        prompts = [window.prompt for window in windows]
        return batch_token_losses(loaded.model, prompts, chunk=settings.chunk)

    # a chunk of one window is work enough for a CPU, and its values depend on no other window
    rows = rows_within(
        loaded.model,
        lambda count: batch_token_losses(loaded.model, [longest] * count, chunk=settings.chunk),
        memory=loaded.memory,
        most=1 if loaded.model.device.type == "cpu" else min(len(items), 64),
    )
    for window, nats in zip(items, in_batches(items, rows, losses), strict=True):
        values: dict[str, float | None] = {
            "bits_per_byte": _bits(nats.sum(), window.sizes.sum()),
            "nats_per_token": float(nats.mean()),
            "ar_hit": float(nats[window.hits].mean()) if window.hits.any() else None,
            "others": float(nats[~window.hits].mean()) if not window.hits.all() else None,
        }
        for first, last in settings.bins:
            inside = (window.starts >= first) & (window.starts < last)
            values[_bin(first, last)] = _bits(nats[inside].sum(), window.sizes[inside].sum())
        yield {
            "id": window.id,
            "cluster": window.cluster,
            "values": {n: v if v is None or math.isfinite(v) else None for n, v in values.items()},
            "flags": [] if np.isfinite(nats).all() else ["loss is not finite"],
            "tokens": len(nats),
            "hits": int(window.hits.sum()),
        }


def _bits(nats: float, size: float) -> float | None:
    return float(nats / math.log(2) / size) if size else None


def _bin(first: int, last: int) -> str:
    return f"bits_per_byte[{first}:{last}]"


def claims(settings: Settings) -> list[Claim]:
    """Lower loss in all, late in a document, and where a pair comes again."""
    first, last = settings.bins[-1]
    lower = {"better": "lower", "unit": "bits per byte", "margin": 0.002}
    return [
        Claim(
            name="loss",
            text="The held-out loss is lower.",
            measure=Measure(name="bits_per_byte", label="held-out loss", **lower),  # pyright: ignore
            paper="3.062 against 3.087 nats per token at 1.4 B parameters (arXiv 2410.05258, "
            "Table 6)",
        ),
        Claim(
            name="loss-late",
            text=f"The loss is lower late in a text, from character {first:,} to {last:,}.",
            measure=Measure(  # pyright: ignore
                name=_bin(first, last), label="loss late in a text", **lower
            ),
            paper="lower at every position up to 64K tokens of books, no numbers in the text "
            "(arXiv 2410.05258, section 3.3)",
        ),
        Claim(
            name="loss-ar-hit",
            text="The loss is lower on tokens that complete a repeated pair of tokens.",
            measure=Measure(
                name="ar_hit",
                label="loss of AR-Hit tokens",
                unit="nats per token",
                better="lower",
                margin=0.005,
            ),
            paper="0.880 against 0.898 nats per token (arXiv 2410.05258, Table 6)",
            same_tokens=True,
        ),
    ]


def tables(settings: Settings, measured: Measured) -> list[Table]:
    """Means of every model; then the loss by position, local and cumulative."""
    rows, positions = [], []
    for name, seeds in measured.items():
        records = [record for found in seeds for record in found.values()]
        tokens = sum(record["tokens"] for record in records)
        share = sum(record["hits"] for record in records) / tokens
        means = (_mean(records, key) for key in ("bits_per_byte", "nats_per_token", "ar_hit"))
        rows.append((name, *means, _mean(records, "others"), f"{100 * share:.1f} %"))
        local = [_mean(records, _bin(*ends)) for ends in settings.bins]
        positions.append((name, *local))
    return [
        Table(
            "Held-out loss",
            (
                *("model", "bits per byte", "nats per token", "AR-Hit, nats", "others, nats"),
                "share of AR-Hit",
            ),
            rows,
            (
                "AR-Hit: the second token of a pair that came before in the window, without pairs "
                "that are frequent in the training text; the cut leaves at most "
                f"{100 * settings.share:.1f} % of the tokens.",
            ),
        ),
        Table(
            "Bits per byte between characters",
            ("model", *(f"{first:,} to {last:,}" for first, last in settings.bins)),
            positions,
        ),
    ]


def _mean(records: Sequence[Record], key: str) -> str:
    values = [r["values"][key] for r in records if r["values"][key] is not None]
    return f"{np.mean(values):.4f}" if values else "n/a"


def figures(settings: Settings, measured: Measured) -> list[Figure]:
    """Loss by position: of each bin, and of all characters up to its end."""
    local = _by_position(settings, measured)
    sizes = np.array([last - first for first, last in settings.bins])
    cumulative = {
        name: [
            (end, float(np.average([y for _, y in points[: n + 1]], weights=sizes[: n + 1])))
            for n, (end, _) in enumerate(points)
        ]
        for name, points in local.items()
    }
    return [
        Figure(
            "Loss by position",
            plots.lines(
                "loss-position",
                "Loss by position",
                {"in each bin": local, "from the start": cumulative},
                across="characters read",
                up="bits per byte",
            ),
            "Left: the loss of the characters of one bin, drawn at its end. Right: the mean from "
            "the start of the text, which drags the early ones along.",
        )
    ]


def _by_position(settings: Settings, measured: Measured) -> Mapping[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for name, seeds in measured.items():
        records = [record for of_seed in seeds for record in of_seed.values()]
        found[name] = []
        for first, last in settings.bins:
            values = [r["values"][_bin(first, last)] for r in records]
            found[name].append((last, float(np.mean([v for v in values if v is not None]))))
    return found
