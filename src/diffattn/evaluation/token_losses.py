"""Loss of every token of a long text, read in chunks through a cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from diffattn.evaluation.caches import with_cache


def token_losses(model: Any, ids: Sequence[int], *, chunk: int = 512) -> np.ndarray:
    """Negative log-likelihood of each token but the first.

        nats_i = -log p(x_i | x_1 .. x_{i-1}),  i = 2 .. L

    Args:
        model: a causal language model of Hugging Face's interface, on its device.
        ids: [L] tokens, L at least 2.
        chunk: tokens that go through the model at a time; logits of one chunk exist at once, for
            L x vocabulary of them do not fit into memory.

    Returns:
        [L - 1] nats in fp64.
    """
    return batch_token_losses(model, [ids], chunk=chunk)[0]


@torch.no_grad()
def batch_token_losses(
    model: Any, rows: Sequence[Sequence[int]], *, chunk: int = 512
) -> list[np.ndarray]:
    """What `token_losses` gives, for several texts at a time.

    Shorter texts are filled up behind their end, which nothing before it sees.

    Args:
        model: as there.
        rows: tokens of each text, at least 2.
        chunk: tokens of each text that go through the model at a time.

    Returns:
        [L - 1] nats in fp64 of each text.
    """
    from transformers import DynamicCache

    was_training = model.training
    model.eval()
    all_ids = pad_sequence([torch.as_tensor(ids) for ids in rows], True).to(model.device)
    cache, found, last = DynamicCache(config=model.config), [], all_ids.shape[1] - 1
    for start in range(0, last, chunk):
        end = min(start + chunk, last)
        logits = model(input_ids=all_ids[:, start:end], **with_cache(model, cache)).logits
        wanted = all_ids[:, start + 1 : end + 1]
        nats = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
        found.append(nats.view(wanted.shape).double().cpu())
    model.train(was_training)
    every = torch.cat(found, dim=1).numpy()
    return [nats[: len(ids) - 1] for nats, ids in zip(every, rows, strict=True)]
