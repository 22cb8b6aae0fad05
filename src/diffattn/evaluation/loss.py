"""Held-out loss of a language model, window by window."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


@torch.no_grad()
def window_losses(model: Any, windows: Iterable[np.ndarray], *, batch_size: int) -> np.ndarray:
    """Mean loss of each window of text.

        loss(w) = -1/(L - 1) sum_i log p(w_i | w_1 .. w_{i-1}),  i = 2 .. L

    Args:
        model: a causal language model of Hugging Face's interface, on its device.
        windows: token windows of one length L.
        batch_size: windows that go through the model at a time.

    Returns:
        [windows] losses in nats per token, in fp64, in the order given.
    """
    was_training = model.training
    model.eval()
    losses = []
    for batch in _batches(windows, batch_size):
        ids = torch.as_tensor(np.stack(batch), device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses.append(nats.view(len(batch), -1).double().mean(dim=1).cpu().numpy())
    model.train(was_training)
    return np.concatenate(losses)


def _batches(windows: Iterable[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    iterator = iter(windows)
    while batch := list(islice(iterator, size)):
        yield batch


@torch.no_grad()
def item_losses(model: Any, items: Iterable[dict[str, np.ndarray]]) -> np.ndarray:
    """Mean loss of each item of packed text, documents kept apart.

        loss(w) = -1/n sum_i log p(w_i | w_1 .. w_{i-1} of the same document)

    Args:
        model: a causal language model of Hugging Face's interface, on its device.
        items: each with `input_ids`, `labels` (-100 where nothing counts) and `position_ids`,
            all [1, L], as `diffattn.data.TextStream` has them.

    Returns:
        [items] losses in nats per token, in fp64, in the order given.
    """
    was_training = model.training
    model.eval()
    losses = []
    for item in items:
        on_device = {n: torch.as_tensor(array, device=model.device) for n, array in item.items()}
        labels = on_device.pop("labels")[:, 1:].flatten()
        logits = model(**on_device, use_cache=False).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, labels, ignore_index=-100).double().item())
    model.train(was_training)
    return np.array(losses)
