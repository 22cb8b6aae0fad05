"""How well a model knows the answers in a text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from diffattn.data.answers import AnswerItem


@dataclass(frozen=True, slots=True)
class AnswerOutcome:
    """Answers of one text."""

    accuracy: float
    """Share of the answers of which every token is the most likely one."""
    loss: float
    """Nats of an answer, -log p(answer | text before it), mean over the text's answers."""


@torch.no_grad()
def answer_outcomes(model: Any, items: Iterable[AnswerItem]) -> list[AnswerOutcome]:
    """Ask for every answer in one pass over each text, earlier answers given.

        loss = -1/n sum_a sum_{i in a} log p(x_i | x_1 .. x_{i-1})

    Args:
        model: a causal language model of Hugging Face's interface, on its device.
        items: texts with answers; where an item has choices, p is over these tokens alone.

    Returns:
        One outcome for each item, in order.
    """
    was_training = model.training
    model.eval()
    outcomes = []
    for item in items:
        ids = torch.as_tensor(item.input_ids, device=model.device)
        # the logits before the first answer are not needed
        first = item.spans[0][0] - 1
        kept = torch.arange(first, len(ids), device=model.device)
        logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=kept).logits[0].float()
        right, nats = [], []
        for start, stop in item.spans:
            scores, wanted = logits[start - 1 - first : stop - 1 - first], ids[start:stop]
            if item.choices is not None:
                scores = scores[:, list(item.choices)]
                wanted = torch.tensor([item.choices.index(int(n)) for n in wanted])
                wanted = wanted.to(scores.device)
            right.append(bool((scores.argmax(-1) == wanted).all()))
            chosen = scores.log_softmax(-1).gather(1, wanted[:, None])
            nats.append(-chosen.double().sum().item())
        outcomes.append(AnswerOutcome(sum(right) / len(right), sum(nats) / len(nats)))
    model.train(was_training)
    return outcomes
