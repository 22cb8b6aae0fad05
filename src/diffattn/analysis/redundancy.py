"""How much the heads of a layer repeat one another."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffattn.dex import Site, find_sites
from diffattn.dex.sites import evaluating


@dataclass(frozen=True)
class HeadRedundancy:
    """Means over all pairs of heads of a layer and over sequences.

    Args:
        map_distance: [layers] 1 - cos of the attention maps; high means different heads.
        output_cka: [layers] linear CKA of the head outputs; high means alike heads.
    """

    map_distance: list[float]
    output_cka: list[float]


@torch.no_grad()
def head_redundancy(model: Any, sequences: Iterable[Tensor]) -> HeadRedundancy:
    """Compare the heads of each layer with one another.

        distance(i, j) = 1 - <A_i, A_j> / (|A_i| |A_j|)
        CKA(i, j) = |O_i^T O_j|^2 / (|O_i^T O_i| |O_j^T O_j|),  columns of O centred, |.| Frobenius

    A is a head's map over all positions (of a differential head the difference of both maps), O
    [T, d_v] what the head gives to the output projection, with an extension where there is one.

    Args:
        model: a causal language model of transformers that returns its maps with eager attention.
        sequences: token ids [1, T]; memory grows with T squared.

    Returns:
        Both means for each layer.

    Source: Kong et al., arXiv 2505.16333, section 2 (which measures); formulas are ours.
    """
    sites, implementation = find_sites(model), model.config._attn_implementation
    outputs: dict[int, Tensor] = {}
    handles = [
        model.get_submodule(site.projection).register_forward_pre_hook(_Kept(outputs, site))
        for site in sites
    ]
    sums, count = torch.zeros(2, len(sites), dtype=torch.float64), 0
    try:
        with evaluating(model):
            model.set_attn_implementation("eager")
            for ids in sequences:
                maps = model(
                    input_ids=ids.to(model.device),
                    use_cache=False,
                    output_attentions=True,
                    logits_to_keep=1,
                ).attentions
                for index in range(len(sites)):
                    sums[0, index] += _distance(maps[index][0].float())
                    sums[1, index] += _cka(outputs[index])
                count += 1
    finally:
        model.set_attn_implementation(implementation)
        for handle in handles:
            handle.remove()
    if not count:
        raise ValueError("sequences: expected at least one, got none")
    distance, cka = (sums / count).tolist()
    return HeadRedundancy(distance, cka)


class _Kept:
    """The hook that keeps the heads before an output projection, [heads, T, d_v]."""

    def __init__(self, outputs: dict[int, Tensor], site: Site) -> None:
        self.outputs, self.site = outputs, site

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        heads = args[0][0].float().unflatten(-1, (-1, self.site.value_dim))
        self.outputs[self.site.layer] = heads.transpose(0, 1)


def _distance(maps: Tensor) -> float:
    """Mean 1 - cos over pairs of [heads, T, T]."""
    unit = torch.nn.functional.normalize(maps.flatten(1), dim=-1)
    return 1 - _mean_of_pairs(unit @ unit.T)


def _cka(outputs: Tensor) -> float:
    """Mean linear CKA over pairs of [heads, T, d_v]."""
    centred = outputs - outputs.mean(1, keepdim=True)
    crossed = torch.einsum("itx,jty->ijxy", centred, centred).square().sum((-1, -2))
    own = crossed.diagonal().sqrt()
    return _mean_of_pairs(crossed / (own[:, None] * own))


def _mean_of_pairs(matrix: Tensor) -> float:
    rows, columns = torch.triu_indices(len(matrix), len(matrix), offset=1)
    if not len(rows):  # a layer of one head repeats nothing
        return float("nan")
    return float(matrix[rows, columns].mean())
