"""Fold the extension into the output projection: a stock model without our code."""

import torch
from torch import Tensor, nn

from diffattn.dex.adapter import Adapter, adapter_of, put_in, take_out
from diffattn.dex.sites import Site
from diffattn.errors import UserError


def merge(model: nn.Module) -> nn.Module:
    """Fold every extension into its layer's output projection.

        W_O[h] <- (I - lam W_D) W_O[h]  for selected heads h, W_O[h] the d_v rows of head h

    The product is formed in fp32 (fp64 for fp64 weights) and rounded once. The model then is
    what transformers knows: `model.save_pretrained` writes a stock checkpoint. A model that is
    already merged stays as it is.

    Args:
        model: one with DEX injected.

    Returns:
        The model.

    Raises:
        UserError: the model has no DEX.

    Source: O' = O (I - lam W_D), the compact form of Kong et al., arXiv 2505.16333, Eq. 3.
    """
    adapter = adapter_of(model)
    if adapter.unmerged is not None:
        return model
    kept, folded = {}, {}
    for layer, extension in adapter.parts.items():
        site = adapter.sites[layer]
        weight = model.get_parameter(f"{site.projection}.weight")
        kept[f"{site.projection}.weight"] = weight.detach().cpu().clone()
        folded[weight] = _folded(weight.detach(), site, extension.heads, extension.scaled_weight())
    with torch.no_grad():
        for weight, value in folded.items():
            weight.copy_(value)
    adapter.unmerged = kept
    take_out(model)
    return model


def _folded(weight: Tensor, site: Site, heads: list[int], added: Tensor) -> Tensor:
    work = torch.promote_types(weight.dtype, torch.float32)
    rows = weight.to(work) if site.transposed else weight.to(work).T  # [H d_v, out]
    blocks = rows.unflatten(0, (site.num_heads, site.value_dim)).clone()
    blocks[heads] += added.detach().to(work) @ blocks[heads]
    rows = blocks.flatten(0, 1)
    return (rows if site.transposed else rows.T).to(weight.dtype)


def unmerge(model: nn.Module) -> nn.Module:
    """Undo `merge` bit for bit.

    Returns:
        The model with its extension beside the output projections again.

    Raises:
        UserError: the model has no DEX, or it is not merged.
    """
    adapter: Adapter = adapter_of(model)
    if adapter.unmerged is None:
        raise UserError("model: expected a merged one, got one whose DEX is not merged")
    with torch.no_grad():
        for name, value in adapter.unmerged.items():
            model.get_parameter(name).copy_(value)
    adapter.unmerged = None
    put_in(model)
    return model
