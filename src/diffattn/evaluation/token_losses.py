"""Loss of every token of a long text, read in chunks through a cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from diffattn.evaluation.caches import with_cache


@torch.no_grad()
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
    from transformers import DynamicCache

    was_training = model.training
    model.eval()
    all_ids = torch.as_tensor(ids, device=model.device)
    cache, found = DynamicCache(config=model.config), []
    for start in range(0, len(all_ids) - 1, chunk):
        part = all_ids[start : min(start + chunk, len(all_ids) - 1)]
        wanted = all_ids[start + 1 : start + 1 + len(part)]
        logits = model(input_ids=part[None], **with_cache(model, cache)).logits[0]
        found.append(F.cross_entropy(logits.float(), wanted, reduction="none").double().cpu())
    model.train(was_training)
    return torch.cat(found).numpy()
