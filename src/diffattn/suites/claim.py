"""What a suite claims, and what its measures mean."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of each item.

    Args:
        name: key in the values of a record.
        label: for people.
        unit: "share" or any other.
        better: which direction is an improvement.
        margin: smallest difference of means that is worth naming.
    """

    name: str
    label: str
    unit: str
    better: Literal["lower", "higher"]
    margin: float


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That the later model is better than the first in a measure.

    Args:
        name: of its card: the suite's for the first claim, SUITE-MORE for others.
        text: the claim in a sentence.
        measure: in which it is decided.
        paper: what the paper reports, with its place; None where it makes no such claim.
        content_free: score of the best strategy that does not read the question, or None.
        strategy: that strategy in words.
        same_tokens: whether it means something between models of one tokenizer alone.
    """

    name: str
    text: str
    measure: Measure
    paper: str | None = None
    content_free: float | None = None
    strategy: str | None = None
    same_tokens: bool = False
