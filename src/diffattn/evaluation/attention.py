"""How much attention a question spends on its answer, and how much on noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffattn.data import RecallItem
from diffattn.evaluation.recall import batches_of_one_length


@dataclass(frozen=True, slots=True)
class AttentionShares:
    """Shares of the absolute attention weight of one item's first question."""

    answer: float
    """On the needle that is the answer."""
    noise: float
    """On the rest of the context: text and other needles."""
    first: float
    """On the first token."""


@torch.no_grad()
def attention_shares(
    model: Any, items: Sequence[RecallItem], *, tokens_per_batch: int
) -> list[AttentionShares]:
    """Where the first question of each item looks.

        share(K) = mean over layers and heads of  sum_{k in K} |A_qk| / sum_k |A_qk|

    q is the position of the first question, the last token of its prompt; A the map of a head,
    for a differential layer the difference of both maps. K is the answer's position, the noise
    (all other tokens between the first and the question) or the first token; the question itself
    is in none of them.

    Args:
        model: a causal language model that can return its maps with eager attention.
        items: sequences of the evaluation grid.
        tokens_per_batch: tokens that go through the model at a time, at least one sequence.

    Returns:
        One record for each item, in order.

    Source: Ye et al., arXiv 2410.05258, section 3.3, Table 3.
    Differs: the paper does not say how signed rows are normalised; ours takes absolute values,
        so that shares lie in [0, 1] for every architecture. Heads and layers are averaged, as
        the authors answered.
    """
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    shares: list[AttentionShares] = []
    for batch in batches_of_one_length(items, tokens_per_batch):
        ids = torch.as_tensor(np.stack([item.sequence.input_ids for item in batch]))
        maps = model(
            input_ids=ids.to(model.device),
            use_cache=False,
            output_attentions=True,
            logits_to_keep=1,
        ).attentions
        for row, item in enumerate(batch):
            question = int(item.sequence.query_positions[0])
            weights = torch.stack([layer[row, :, question].abs() for layer in maps]).double()
            rows = weights / weights.sum(dim=-1, keepdim=True)
            mean = rows.mean(dim=(0, 1)).cpu().numpy()
            answer = float(mean[item.sequence.needle_positions[0]])
            context = float(mean[1:question].sum())
            shares.append(AttentionShares(answer, context - answer, float(mean[0])))
    model.set_attn_implementation(implementation)
    model.train(was_training)
    return shares
