"""Which label a model gives behind a question, of those that it may give."""

import heapq
import itertools
from collections.abc import Mapping, Sequence

import torch

from diffattn.evaluation.continuations import ReadContext

Ids = tuple[int, ...]


class LabelChoice:
    """A question behind a read context; what follows it is read once for each beginning.

    Used as a context manager, which takes the question out of the cache again.

    Args:
        context: already read.
        question: tokens, at least one.
    """

    def __init__(self, context: ReadContext, question: Sequence[int]) -> None:
        self._context, self._size = context, len(question)
        rows = context.extend(question)
        self._rows: dict[Ids, torch.Tensor] = {(): rows[-1].log_softmax(-1)}

    def __enter__(self) -> "LabelChoice":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.take_back(self._size)

    def _after(self, path: Ids) -> torch.Tensor:
        """[vocabulary] log-probabilities of what follows some tokens."""
        if path not in self._rows:
            rows = self._context.extend(path).log_softmax(-1)
            self._context.take_back(len(path))
            for n, row in enumerate(rows, 1):
                self._rows[path[:n]] = row
        return self._rows[path]

    def score(self, ids: Ids) -> float:
        """Log-probability of tokens, in nats."""
        self._after(ids[:-1])
        return sum(float(self._rows[ids[:n]][token]) for n, token in enumerate(ids))

    def constrained(self, prefixes: Mapping[str, Ids]) -> str:
        """Greedy decoding among tokens that go on with a label.

        Args:
            prefixes: label -> its shortest unique tokens.
        """
        path: Ids = ()
        left = dict(prefixes)
        while len(left) > 1:
            row = self._after(path)
            path = (*path, max({ids[len(path)] for ids in left.values()}, key=lambda t: row[t]))
            left = {name: ids for name, ids in left.items() if ids[: len(path)] == path}
        return next(iter(left))

    def likeliest(self, labels: Mapping[str, Ids]) -> str:
        """The label of the highest log-probability.

        A beginning is at least as likely as what it begins, so beginnings are read in the order of
        their probability until the first whole label: exact, mostly with few of them read.

        Args:
            labels: label -> tokens, none of which begins another.
        """
        whole = {ids: name for name, ids in labels.items()}
        ticket = itertools.count()
        queue: list[tuple[float, int, Ids]] = [(0.0, next(ticket), ())]
        while True:
            cost, _, path = heapq.heappop(queue)
            if path in whole:
                return whole[path]
            row = self._after(path)
            tokens = {i[len(path)] for i in whole if i[: len(path)] == path}
            for token in sorted(tokens):
                heapq.heappush(queue, (cost - float(row[token]), next(ticket), (*path, token)))
