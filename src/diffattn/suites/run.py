"""Evaluates models: every suite on every seed, then cards and the page."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffattn import __version__
from diffattn.errors import UserError
from diffattn.locks import held
from diffattn.machine import machine
from diffattn.report.numbers import duration_text
from diffattn.signals import stop_requests
from diffattn.suites.cards import Card, make_card
from diffattn.suites.records import Record, Records
from diffattn.suites.report import write_report
from diffattn.suites.subject import (
    Loaded,
    Subject,
    find_subjects,
    identity,
    load,
    with_common_seeds,
)
from diffattn.suites.suite import settings_of, suite_named, values_of
from diffattn.suites.text import Text, text_of
from diffattn.whole_file import write_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SAID_EVERY = 10.0  # seconds between lines of progress


class StoppedError(Exception):
    """The person asked to stop; what was measured is kept."""


def evaluate(
    models: Sequence[str],
    suites: Sequence[str],
    out: str | Path,
    *,
    data: str | None = None,
    dtype: str = "fp32",
    memory: int | None = None,
    settings: Mapping[str, Mapping[str, str]] | None = None,
    resume: bool = False,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Card]:
    """Measure models in suites and write what that says of every claim.

    Args:
        models: folders of models, or arms of comparisons; each later one is compared with the
            first.
        suites: names, see `diffattn.suites.suite.SUITES`.
        out: gets `records/`, `cards/NAME.json` and `report.html`.
        data: text to read, all of it held out; None as `text_of` says.
        dtype: "fp32" or "bf16".
        memory: bytes that a model and a batch may take; None for what is free.
        settings: suite -> field -> value as text.
        resume: whether `out` may hold records, which are not measured again.
        command: for the page.
        say: is told what happens, a line at a time.

    Returns:
        The cards, by name.

    Raises:
        UserError: bad input, in one line.
        StoppedError: the person asked to stop; `resume` goes on.
    """
    folder = Path(out).expanduser()
    if dtype not in DTYPES:
        raise UserError(f"dtype: expected {' or '.join(DTYPES)}, got {dtype!r}")
    given = settings or {}
    for name in given:
        if name not in suites:
            raise UserError(f"set: {name} is not among the suites ({', '.join(suites)})")
    chosen = {name: settings_of(name, given.get(name, {})) for name in suites}
    named = find_subjects(models)
    subjects = with_common_seeds(named)
    for before, after in zip(named, subjects, strict=True):
        if before.seeds != after.seeds:
            say(f"{after.name}: seeds {after.seeds} alone, which every arm has finished")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out: expected a folder, got the file {folder}")
    if folder.exists() and any(folder.iterdir()) and not resume:
        raise UserError(f"out: expected a new folder, got {folder}; add --resume to go on with it")
    text = text_of(data, subjects)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: {folder} cannot be made: {error.strerror}") from error
    with held(folder / ".lock", wait=False) as free, stop_requests() as should_stop:
        if not free:
            raise UserError(f"out: another command is at work in {folder}")
        measured, headers = _measured(
            subjects, chosen, folder, text, dtype, memory, say=say, should_stop=should_stop
        )
    tokenizers = {header["tokenizer"] for found in headers.values() for header in found}
    cards: dict[str, Card] = {}
    for name, values in chosen.items():
        configuration = {
            "suite": name,
            "settings": values_of(values),
            "text": text.source,
            "dtype": dtype,
            "diffattn": __version__,
        }
        for claim in suite_named(name).claims(values):
            cards[claim.name] = make_card(
                claim,
                measured[name],
                configuration=configuration,
                weights={s: [header["weights"] for header in h] for s, h in headers.items()},
                same_tokens=len(tokenizers) == 1,
            )
    place = folder / "cards"
    place.mkdir(exist_ok=True)
    for name, card in cards.items():
        write_json(place / f"{name}.json", card)
    write_report(cards, chosen, measured, headers, command=command, path=folder / "report.html")
    return cards


def _measured(
    subjects: Sequence[Subject],
    chosen: Mapping[str, Any],
    folder: Path,
    text: Text,
    dtype: str,
    memory: int | None,
    *,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> tuple[dict[str, dict[str, list[dict[str, Record]]]], dict[str, list[dict[str, Any]]]]:
    """Records by suite, subject and seed; headers by subject, one for each suite and seed."""
    found: dict[str, dict[str, list[dict[str, Record]]]] = {name: {} for name in chosen}
    headers: dict[str, list[dict[str, Any]]] = {}
    places = [
        (subject, seed, path)
        for subject in subjects
        for seed, path in zip(subject.seeds or (0,), subject.models, strict=True)
    ]
    for place, (subject, seed, path) in enumerate(places):
        what = f"{subject.name}, seed {seed}" if len(subject.models) > 1 else subject.name
        # a function of its own, so that no two models are in memory
        for name, header, records in _of_model(
            path,
            chosen,
            folder / "records",
            f"{subject.name}-{seed}.jsonl",
            text,
            dtype,
            memory,
            say=lambda line, at=(place + 1, what): say(f"[{at[0]}/{len(places)}] {at[1]}, {line}"),
            should_stop=should_stop,
        ):
            headers.setdefault(subject.name, []).append(header)
            found[name].setdefault(subject.name, []).append(records)
    return found, headers


def _of_model(
    path: Path,
    chosen: Mapping[str, Any],
    folder: Path,
    file: str,
    text: Text,
    dtype: str,
    memory: int | None,
    *,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> list[tuple[str, dict[str, Any], dict[str, Record]]]:
    """Name, header and records of each suite."""
    loaded, known = load(path, DTYPES[dtype], memory), identity(path)
    found = []
    for name, values in chosen.items():
        suite = suite_named(name)
        items = suite.items(values, loaded, text)
        header = _header(name, values, loaded, known, items, text, dtype)
        records = Records(folder / name / file, header)
        todo = [item for item in items if item.id not in records.found]
        for record in _told(suite.measure(values, loaded, todo), len(todo), name, say):
            records.add(record)
            if should_stop():
                raise StoppedError
        kept = {item.id: records.found[item.id] for item in items}
        found.append((name, {"model": str(path), **header}, kept))
    return found


def _told(
    stream: Iterator[Record], count: int, what: str, say: Callable[[str], None]
) -> Iterator[Record]:
    """The records, with a line of progress now and then."""
    say(f"{what}: {count} items" if count else f"{what}: there already")
    started = told = time.monotonic()
    for done, record in enumerate(stream, 1):
        yield record
        now = time.monotonic()
        if now - told >= _SAID_EVERY and done < count:
            left = (now - started) / done * (count - done)
            say(f"{what}: {done} of {count}, about {duration_text(left)} left")
            told = now


def _header(
    name: str,
    values: Any,
    loaded: Loaded,
    known: str,
    items: Sequence[Any],
    text: Text,
    dtype: str,
) -> dict[str, Any]:
    """Everything that the records of a model rest on."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item.id}\0{list(map(int, item.prompt))}\n".encode())
    vocabulary = repr(sorted(loaded.tokenizer.get_vocab().items()))
    first = list(map(int, items[0].prompt))
    return {
        "suite": name,
        "settings": values_of(values),
        "weights": known,
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "text": text.digest,
        "template": hashlib.sha256(suite_named(name).TEMPLATE.encode()).hexdigest(),
        "items": digest.hexdigest(),
        "first_ids": first[:6],
        "last_ids": first[-6:],
        "dtype": dtype,
        "torch": machine()["torch"],
    }
