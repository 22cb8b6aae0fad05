"""Shares of attention rows on parts of a text, by three rules for signed rows."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

RULES = ("abs", "raw", "rowsum")


def attention_parts(size: int, answer: Sequence[tuple[int, int]], query: int) -> dict[str, Tensor]:
    """Which keys belong to the first token, the answer, the question, and the noise.

    Args:
        size: S keys.
        answer: tokens of each span of the answer.
        query: first token of the question.

    Returns:
        Part -> [S] bool; the parts are disjoint and cover all keys.
    """
    found = {name: torch.zeros(size, dtype=torch.bool) for name in ("answer", "first", "query")}
    for start, stop in answer:
        found["answer"][start:stop] = True
    found["query"][query:] = True
    found["first"][0] = True
    found["answer"][0] = False
    found["noise"] = ~(found["answer"] | found["first"] | found["query"])
    return found


def row_shares(rows: Tensor, parts: Mapping[str, Tensor], rule: str) -> dict[str, float]:
    """Mean share of each part over heads.

        raw:    sum_{k in K} a_k
        rowsum: sum_{k in K} a_k / sum_k a_k
        abs:    sum_{k in K} |a_k| / sum_k |a_k|

    Args:
        rows: [heads, S], signed or not.
        parts: part -> [S] bool.
        rule: one of them; with rowsum a row whose sum is near 0 explodes.
    """
    rows = rows.double()
    if rule == "abs":
        rows = rows.abs()
    if rule != "raw":
        rows = rows / rows.sum(-1, keepdim=True)
    return {name: rows[:, part].sum(-1).mean().item() for name, part in parts.items()}


def negative_mass(rows: Tensor) -> float:
    """Mean over heads of the absolute weight below 0 over all absolute weight."""
    rows = rows.double()
    return (rows.clamp(max=0).abs().sum(-1) / rows.abs().sum(-1)).mean().item()


def absolute_entropy(rows: Tensor) -> float:
    """Mean over heads of -sum_k p_k ln p_k in nats, p the absolute shares."""
    shares = rows.double().abs()
    shares = shares / shares.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).mean().item()
