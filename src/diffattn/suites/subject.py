"""What is evaluated: a model's folder, or an arm of a comparison with its seeds."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diffattn.data import load_tokenizer
from diffattn.dex.base import load_base
from diffattn.errors import UserError

_SEED = re.compile(r"seed(\d+)")


@dataclass(frozen=True)
class Subject:
    """One side of an evaluation.

    Args:
        name: in cards and pictures; no other subject has it.
        models: folder of each seed's model, in order; one for a model that stands alone.
        data: folder of the text of the comparison that it is an arm of, or None.
        seeds: number of each model's seed; None of a model that stands alone.
    """

    name: str
    models: tuple[Path, ...]
    data: Path | None = None
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Loaded:
    """A model in memory.

    Args:
        model: a causal language model of Hugging Face's interface, in evaluation mode.
        tokenizer: its own.
        limit: tokens of its longest context, or None where its configuration names none.
        memory: bytes that the model and a batch may take, or None for what is free.
    """

    model: Any
    tokenizer: Any
    limit: int | None
    memory: int | None = None


def find_subjects(given: Sequence[str]) -> list[Subject]:
    """What the MODEL arguments name.

    Args:
        given: folders with config.json, or folders OUT/runs/ARM of `diffattn compare`, also written
            as OUT:ARM.

    Returns:
        A subject for each; a name that comes again gets a number.

    Raises:
        UserError: a folder is neither, or an arm has no finished seed.
    """
    subjects: list[Subject] = []
    for text in given:
        path = Path(text).expanduser()
        run, colon, arm = str(path).rpartition(":")
        found = _model(path) or _arm(path) or (_arm(Path(run) / "runs" / arm) if colon else None)
        if found is None:
            raise UserError(
                "MODEL: expected a folder with config.json, or an arm OUT/runs/ARM (or OUT:ARM) of "
                f"a comparison, got {text}"
            )
        repeats = sum(re.sub(r"#\d+$", "", other.name) == found.name for other in subjects)
        name = f"{found.name}#{repeats + 1}" if repeats else found.name
        subjects.append(replace(found, name=name))
    return subjects


def with_common_seeds(subjects: Sequence[Subject]) -> list[Subject]:
    """Arms with the seeds alone that all of them have finished, for these are paired.

    Raises:
        UserError: there is no such seed.
    """
    arms = [set(subject.seeds) for subject in subjects if subject.seeds is not None]
    if not arms:
        return list(subjects)
    common = set.intersection(*arms)
    if not common:
        raise UserError("MODEL: the arms have finished no seed in common, so none can be paired")
    return [
        subject
        if subject.seeds is None
        else replace(
            subject,
            models=tuple(
                model
                for seed, model in zip(subject.seeds, subject.models, strict=True)
                if seed in common
            ),
            seeds=tuple(sorted(common)),
        )
        for subject in subjects
    ]


def _model(path: Path) -> Subject | None:
    if not (path / "config.json").is_file():
        return None
    whole = path.resolve()
    seed = _SEED.fullmatch(whole.parent.name)
    if whole.name == "model" and seed:  # one seed of an arm
        data = whole.parents[3] / "data"
        name = f"{whole.parents[1].name}-{whole.parent.name}"
        return Subject(name, (path,), data if data.is_dir() else None)
    return Subject(whole.name, (path,))


def _arm(path: Path) -> Subject | None:
    if not path.is_dir():
        return None
    seeds = sorted(
        (int(match[1]), place)
        for place in path.iterdir()
        if (match := _SEED.fullmatch(place.name)) and place.is_dir()
    )
    if not seeds:
        return None
    # a run is finished when its result is there: the model is saved before it
    finished = [(seed, p) for seed, p in seeds if (p / "result.json").is_file()]
    if not finished:
        raise UserError(f"MODEL: {path} has no finished run; diffattn compare --resume goes on")
    data = path.resolve().parents[1] / "data"
    return Subject(
        path.resolve().name,
        tuple(p / "model" for _, p in finished),
        data if data.is_dir() else None,
        tuple(seed for seed, _ in finished),
    )


def load(folder: Path, dtype: torch.dtype, memory: int | None = None) -> Loaded:
    """Load a model and its tokenizer from its folder, to the best device.

    Args:
        folder: of the model.
        dtype: of its weights in memory.
        memory: bytes that it and a batch may take, or None for what is free.

    Raises:
        UserError: either cannot be loaded; nothing is downloaded, no code of the folder runs.
    """
    model = load_base(folder, dtype=dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    limit = getattr(model.config, "max_position_embeddings", None)
    return Loaded(model, load_tokenizer(folder), limit, memory)


def identity(folder: Path) -> str:
    """SHA-256 over everything in a folder that decides what its model computes."""
    digest = hashlib.sha256()
    kinds = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
    for path in sorted({path for kind in kinds for path in folder.glob(kind)}):
        digest.update(f"{path.name}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
