"""Tokens that complete a pair of tokens seen before in the same text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from diffattn.data.packing import IntArray


@dataclass(frozen=True)
class PairCounts:
    """How often each pair of neighbouring tokens stands in some texts.

    Args:
        codes: [pairs] a 2^32 + b of each pair (a, b), sorted.
        counts: [pairs].
    """

    codes: IntArray
    counts: IntArray

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> "PairCounts":
        """Count the pairs within each text."""
        parts = [_codes(np.asarray(ids, dtype=np.int64)) for ids in texts]
        codes, counts = np.unique(
            np.concatenate([*parts, np.empty(0, np.int64)]), return_counts=True
        )
        return cls(codes, counts.astype(np.int64))

    def at(self, codes: IntArray) -> IntArray:
        """How often each of these pairs was counted."""
        if not len(self.codes):
            return np.zeros(len(codes), dtype=np.int64)
        place = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return np.where(self.codes[place] == codes, self.counts[place], 0)


def repeated_pairs(ids: Sequence[int], counts: PairCounts) -> IntArray:
    """For each token but the first: is it the second of a pair that came before?

    Args:
        ids: [L] tokens of a text.
        counts: pairs of the training text.

    Returns:
        [L - 1]: how often training had the pair where it did come before, else -1.

    Source: slices of Arora et al., arXiv 2312.04927, with pairs as there.
    """
    codes = _codes(np.asarray(ids, dtype=np.int64))
    _, first = np.unique(codes, return_index=True)
    repeated = np.ones(len(codes), dtype=bool)
    repeated[first] = False
    return np.where(repeated, counts.at(codes), -1)


def frequency_cut(repeats: Iterable[IntArray], share: float) -> int:
    """The highest count of pairs that still leaves at most a share of all tokens as repeats.

    Pairs that training had often are known by heart; what repeats and is rare must be recalled.

    Args:
        repeats: what `repeated_pairs` gives for each text.
        share: of tokens that may count as repeats.

    Returns:
        The cut: repeats with at most this count in training are recalled. -1 where even pairs
        that training never had are more than the share.
    """
    every = np.concatenate([*repeats, np.empty(0, np.int64)])
    found = np.sort(every[every >= 0])
    most = int(share * len(every))
    if len(found) <= most:
        return int(found[-1]) if len(found) else 0
    # all equal counts stand on one side of the cut
    return int(found[most]) - 1


def _codes(ids: IntArray) -> IntArray:
    return (ids[:-1] << 32) + ids[1:]
