"""What a comparison will do, and the folder that belongs to it."""

import dataclasses
import errno
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffattn.compare.arms import Arm
from diffattn.compare.presets import Preset
from diffattn.errors import UserError
from diffattn.locks import held
from diffattn.whole_file import DRAFT, write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparePlan:
    """A comparison with every setting resolved."""

    arms: tuple[Arm, ...]
    """The first is what the others are compared with."""
    seeds: int
    """Seeds 0 .. seeds - 1, each trained in every arm."""
    preset: Preset
    """Sizes; `tokens` is the resolved number."""
    data: str | None
    """Path of the text; None is the bundled corpus."""
    tokenizer: str | None = None
    """Folder of a tokenizer; None trains one on the training documents."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UserError(f"seeds: expected at least 1, got {self.seeds}")
        if self.training_steps < 4:
            raise UserError(
                f"tokens: expected at least {math.ceil(4 * self.tokens_per_step):,} (four "
                f"optimizer steps of preset {self.preset.name}), got {self.preset.tokens:,}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of an optimizer step."""
        return self.preset.rows_per_step * self.preset.length

    @property
    def training_steps(self) -> int:
        """Optimizer steps of one run."""
        return math.ceil(self.preset.tokens / self.tokens_per_step)

    @property
    def recall_stages(self) -> tuple[tuple[int, int], ...]:
        """Stages of the recall steps, as (number of steps, tokens of a sequence).

        The first half of them doubles the length up to the full one: the circuit that finds a
        needle forms in tens of steps among few tokens and in hundreds among many.
        """
        # one text token for each needle is the least that a sequence can hold
        shortest = 1 + 2 * self.preset.recall_needles + 2 * self.preset.recall_queries
        lengths = [self.preset.length]
        while lengths[0] % 2 == 0 and lengths[0] // 2 >= shortest:
            lengths.insert(0, lengths[0] // 2)
        steps = int(self.training_steps * self.preset.recall_share)
        short = len(lengths) - 1
        each = steps // (2 * short) if short else 0
        return (
            *((each, length) for length in lengths[:-1]),
            (steps - short * each, lengths[-1]),
        )

    def record(self) -> dict[str, Any]:
        """Everything that the results depend on, as JSON."""
        record = json.loads(json.dumps(dataclasses.asdict(self)))
        for part in (record["preset"], *record["arms"]):
            del part["about"]
        return record


class OutputFolder:
    """The folder of one comparison; its plan is the first file written.

    Args:
        path: the folder; is created.
        plan: the comparison.
        resume: whether to go on with what the folder holds, perhaps with more seeds than before.

    Raises:
        UserError: the folder holds another comparison, or this one without `resume`, or cannot
            be written.
    """

    def __init__(self, path: Path, plan: ComparePlan, *, resume: bool) -> None:
        self.path = path
        record = plan.record()
        plan_file = path / "plan.json"
        with said_plainly(path):
            path.mkdir(parents=True, exist_ok=True)
            if not self._claimed(resume) and any(not _is_ours(entry) for entry in path.iterdir()):
                raise UserError(
                    f"out: expected a new or empty folder, got {path}, which holds other files"
                )
        # held, so that no plan takes the place of one that another command works on
        with self.locked(), said_plainly(path):
            if self._claimed(resume):
                self._check_same(plan_file, record, resume=resume)
            else:
                write_json(plan_file, record)

    def _claimed(self, resume: bool) -> bool:
        """Whether the folder belongs to a plan.

        One whose text was refused has made nothing yet, and gives way unless it is resumed.
        """
        begun = any((self.path / made).exists() for made in ("data/facts.json", "runs"))
        return (self.path / "plan.json").exists() and (begun or resume)

    def _check_same(self, plan_file: Path, record: dict[str, Any], *, resume: bool) -> None:
        try:
            found = json.loads(plan_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"out: {plan_file} is damaged ({error}); choose another folder") from (
                error
            )
        different = sorted(
            name
            for name in {*_flat(found), *_flat(record)}
            if _flat(found).get(name) != _flat(record).get(name)
        )
        if resume and different == ["seeds"] and found["seeds"] < record["seeds"]:
            return  # more seeds: `adopt` makes them part of the plan
        if different:
            name = different[0]
            raise UserError(
                f"out: {self.path} belongs to another comparison ({name} there is "
                f"{_flat(found).get(name)!r}, here {_flat(record).get(name)!r}); choose another "
                "folder"
            )
        if not resume:
            raise UserError(
                f"out: {self.path} already holds this comparison; add --resume to go on with it, "
                "or choose another folder"
            )

    def adopt(self, plan: ComparePlan) -> None:
        """Make added seeds part of the folder's plan, once its text is known to be unchanged."""
        with said_plainly(self.path):
            write_json(self.path / "plan.json", plan.record())

    @property
    def data(self) -> Path:
        """Tokenizer and token files."""
        return self.path / "data"

    def run(self, arm: Arm, seed: int) -> Path:
        """Folder of one training run."""
        return self.path / "runs" / arm.name.replace("#", "-") / f"seed{seed}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second command.

        Raises:
            UserError: another command holds it.
        """
        with ExitStack() as stack:
            with said_plainly(self.path):
                mine = stack.enter_context(held(self.path / _LOCK, wait=False))
            if not mine:
                raise UserError(
                    f"out: another command is working in {self.path}; wait for it or choose "
                    "another folder"
                )
            yield


_LOCK = ".lock"
_PLAIN_ERRORS = {
    errno.ENOENT,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.EFBIG,
    errno.ENAMETOOLONG,
}


@contextmanager
def said_plainly(path: Path) -> Iterator[None]:
    """Turn a disk that is full or closed into one line.

    Args:
        path: the folder that was being written.

    Raises:
        UserError: the block failed because the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _PLAIN_ERRORS:
            raise
        where = error.filename or path
        raise UserError(f"out: cannot write {where}: {error.strerror}") from error
    except Exception as error:  # libraries in other languages report a full disk in their words
        if isinstance(error, UserError) or not _sounds_full(error):
            raise
        raise UserError(f"out: cannot write {path}: no space left on the disk") from error


def _sounds_full(error: Exception) -> bool:
    text = str(error)
    return any(
        phrase in text
        for phrase in ("No space left", "os error 28", "PytorchStreamWriter", "inline_container")
    )


def _is_ours(path: Path) -> bool:
    """Whether a command that ended at its start can have left this behind."""
    draft = path.name.startswith(".") and path.name.endswith(DRAFT)
    return draft or path.name in (_LOCK, "plan.json", "data")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested JSON value by dotted name."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, part in parts:
        flat.update(_flat(part, f"{prefix}.{name}" if prefix else str(name)))
    return flat
