"""Token ids of demonstrations, of test items, and of the labels that may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from diffattn.data.answers import starts_with_bos
from diffattn.data.many_shot import Example
from diffattn.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "\n==\n"


class ShotPrompts:
    """Encodes examples piece by piece, each the same wherever it stands.

    An example is `NAME: text`, a line end, `LABELNAME: label`; a line of two equals signs stands
    between examples. A test item ends right behind the colon, without a blank.

    Args:
        tokenizer: of the model.
        names: what a text and its label are called.
        labels: all labels.

    Attributes:
        labels: label -> its tokens and the first token of the separator. That token ends a label,
            so that none is the beginning of another.

    Raises:
        UserError: two labels have the same tokens, or a label joins the colon in a token.

    Source: Bertsch et al., arXiv 2405.00200. Differs: every label gets the line end when whole
        labels are scored; among shortest prefixes it counts for labels that begin others alone.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, names: tuple[str, str], labels: Sequence[str]
    ) -> None:
        self._tokenizer, self._names = tokenizer, names
        self._separator = self._ids(SEPARATOR)
        self.labels = {name: (*self._label(name), self._separator[0]) for name in labels}
        if len(set(self.labels.values())) < len(self.labels):
            raise UserError(f"tokenizer: it gives the same tokens for some of {sorted(labels)}")

    def _ids(self, text: str) -> list[int]:
        found = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return cast(list[int], found)

    def _label(self, label: str) -> list[int]:
        stem = f"{self._names[1]}:"
        before, whole = self._ids(stem), self._ids(f"{stem} {label}")
        if whole[: len(before)] != before or len(whole) == len(before):
            raise UserError(f"tokenizer: {label!r} has no tokens of its own behind {stem!r}")
        return whole[len(before) :]

    def question(self, text: str) -> list[int]:
        """Tokens of a test item."""
        return self._ids(f"{self._names[0]}: {text}\n{self._names[1]}:")

    def context(self, examples: Sequence[Example]) -> list[int]:
        """Tokens of demonstrations, with one BOS where the tokenizer uses one."""
        bos = self._tokenizer.bos_token_id
        found = [bos] if bos is not None and starts_with_bos(self._tokenizer) else []
        for text, label in examples:
            found += [*self.question(text), *self.labels[label][:-1], *self._separator]
        return cast(list[int], found)


def shortest_prefixes(labels: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The fewest first tokens that tell each label from all others.

    Args:
        labels: label -> tokens, none of which begins another.
    """
    found = {}
    for name, ids in labels.items():
        others = [other for key, other in labels.items() if key != name]
        size = next(n for n in range(1, len(ids) + 1) if all(o[:n] != ids[:n] for o in others))
        found[name] = ids[:size]
    return found
