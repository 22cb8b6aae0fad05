"""A model with its extension: put in, switched off, taken out."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffattn.dex.config import DexConfig
from diffattn.dex.extension import DexExtension
from diffattn.dex.sites import Site, find_sites
from diffattn.errors import UserError

EXTENSION = "dex"
FROZEN_ENTRIES = "frozen_entries"
"""attribute of a parameter that trains in part: how many entries stay as they are"""


@dataclass
class Adapter:
    """What `inject` did to a model.

    Args:
        config: the settings.
        sites: the attention of each layer.
        fingerprint: of the names and shapes of the model's parameters before.
        levels: `levels_of` the parameters before.
        originals: name -> value before training, of W_K, W_V and W_O.
        step: optimizer steps done.
        unmerged: name -> W_O before `merge`, while the model is merged.
        parts: layer -> extension, in the model or, while it is merged, kept aside.
        handles: hooks in the model.
    """

    config: DexConfig
    sites: list[Site]
    fingerprint: str
    levels: list[float]
    originals: dict[str, Tensor]
    step: int = 0
    unmerged: dict[str, Tensor] | None = None
    parts: dict[int, DexExtension] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)


def adapter_of(model: nn.Module) -> Adapter:
    """The adapter in a model.

    Raises:
        UserError: there is none.
    """
    adapter = model.__dict__.get("_dex")
    if adapter is None:
        raise UserError(
            f"model: expected one with DEX injected, got a plain {type(model).__name__}"
        )
    return adapter


def inject(model: nn.Module, config: DexConfig, *, trainable: bool = True) -> nn.Module:
    """Put the extension into a model and choose what trains.

    The model is changed in place: an attention layer with selected heads gets a submodule `dex`,
    W_K, W_V, W_O and the extension require gradients, and nothing else does. Where keys and
    values share a fused projection with queries, the rows of the queries get zero gradients.

    Args:
        model: a causal language model of transformers in fp32 or fp64; train it in bf16 by
            autocast.
        config: the settings.
        trainable: False freezes all of it, and 16 bits are welcome.

    Returns:
        The model.

    Raises:
        UserError: DEX is already there, the model has no attention that DEX knows, the plan names
            layers or heads that are not there, or weights have 16 bits.

    Source: Kong et al., arXiv 2505.16333, section 3.
    """
    if "_dex" in model.__dict__:
        raise UserError("model: DEX is already injected; call unload first")
    sites = find_sites(model)
    _check_plan(config, sites)
    mark, levels = fingerprint(model), levels_of(model)
    trained = _trained_weights(model, sites) if config.trains != "extension" else {}
    for name, (parameter, _) in trained.items():
        if trainable and parameter.dtype.itemsize < 4:
            raise UserError(
                f"model: expected fp32 weights, got {parameter.dtype} in {name}, which swallows "
                "small steps; load with dtype=torch.float32 and train in bf16 by autocast"
            )
    originals = {name: p.detach().cpu().clone() for name, (p, _) in trained.items()}
    adapter = Adapter(config, sites, mark, levels, originals)
    model.requires_grad_(False)
    for parameter, rows in trained.values() if trainable else ():
        parameter.requires_grad_(True)
        if rows is not None:
            kept = parameter.numel() // rows.numel() * int((~rows).sum())
            setattr(parameter, FROZEN_ENTRIES, kept)
    for site in sites:
        heads = config.selected(site.layer, site.num_heads)
        if heads:
            adapter.parts[site.layer] = _extension(site, heads, config).requires_grad_(trainable)
    model.__dict__["_dex"] = adapter
    put_in(model)
    return model


def _check_plan(config: DexConfig, sites: list[Site]) -> None:
    for layer, heads in (config.heads or {}).items():
        if not 0 <= layer < len(sites):
            raise UserError(f"heads: expected layers 0 to {len(sites) - 1}, got {layer}")
        count = sites[layer].num_heads
        if sorted(set(heads)) != sorted(heads) or not all(0 <= head < count for head in heads):
            raise UserError(
                f"heads: expected different heads from 0 to {count - 1} in layer {layer}, "
                f"got {heads}"
            )


def _extension(site: Site, heads: list[int], config: DexConfig) -> DexExtension:
    return DexExtension(
        heads,
        num_heads=site.num_heads,
        value_dim=site.value_dim,
        start=config.start(site.layer),
        ramp_steps=config.ramp_steps,
        pinned=config.lam == "pinned",
        sign=config.sign,
        per_head=config.per_head,
        init_std=config.init_std,
    )


def put_in(model: nn.Module) -> None:
    """Make the extensions part of the model's forward pass; saving it whole is refused."""
    adapter = adapter_of(model)
    for layer, extension in adapter.parts.items():
        name = adapter.sites[layer].projection
        projection = model.get_submodule(name)
        extension.to(next(projection.parameters()).device)
        model.get_submodule(name.rpartition(".")[0]).add_module(EXTENSION, extension)
        handle = projection.register_forward_pre_hook(_Extended(extension))
        adapter.handles.append(handle)
    for parameter, rows in _trained_weights(model, adapter.sites).values():
        if parameter.requires_grad and rows is not None:
            adapter.handles.append(parameter.register_hook(_RowsOnly(rows)))
    model.__dict__["save_pretrained"] = _refuse_to_save


def take_out(model: nn.Module) -> None:
    """Leave a plain model, whose weights stay as they are."""
    adapter = adapter_of(model)
    for handle in adapter.handles:
        handle.remove()
    adapter.handles.clear()
    for layer in adapter.parts:
        parent = model.get_submodule(adapter.sites[layer].projection.rpartition(".")[0])
        parent._modules.pop(EXTENSION, None)
    model.__dict__.pop("save_pretrained", None)


class _Extended:
    """The hook before an output projection."""

    def __init__(self, extension: DexExtension) -> None:
        self.extension, self.on = extension, True

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (self.extension(args[0]), *args[1:]) if self.on else None


class _RowsOnly:
    """The hook that keeps the gradient of some entries of a fused weight."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __call__(self, gradient: Tensor) -> Tensor:
        self.rows = self.rows.to(gradient.device)
        return gradient.masked_fill(~self.rows, 0.0)


def _trained_weights(
    model: nn.Module, sites: list[Site]
) -> dict[str, tuple[nn.Parameter, Tensor | None]]:
    """Weights and biases of keys, values and outputs, with a mask where not all of it trains."""
    found: dict[str, tuple[nn.Parameter, Tensor | None]] = {}
    for site in sites:
        for name, rows in {**site.keys_values, site.projection: None}.items():
            module = model.get_submodule(name)
            for kind, parameter in module.named_parameters(recurse=False):
                mask = None
                if rows is not None:
                    wide = rows[None] if site.transposed else rows[:, None]
                    mask = rows if parameter.dim() == 1 else wide
                found[f"{name}.{kind}"] = (parameter, mask)
    return found


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise UserError(
        "save_pretrained: this model has DEX injected and would be saved as if it were merged; "
        "call diffattn.dex.save for the adapter, or diffattn.dex.merge first"
    )


def set_step(model: nn.Module, step: int) -> None:
    """Move lam's schedule to `step` optimizer steps done.

    Raises:
        UserError: the model has no DEX, or the step is negative.
    """
    if step < 0:
        raise UserError(f"step: expected a count from 0, got {step}")
    adapter_of(model).step = step
    for extension in adapter_of(model).parts.values():
        extension.set_step(step)


@contextmanager
def disable(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the block the model is the one it was before `inject`, bit for bit.

    Yields:
        The model.

    Raises:
        UserError: the model has no DEX, or it is merged.
    """
    adapter = adapter_of(model)
    if adapter.unmerged is not None:
        raise UserError("model: expected one that is not merged; call unmerge first")
    hooks = list(_hooks(model))
    trained = {n: model.get_parameter(n).detach().clone() for n in adapter.originals}
    _write(model, adapter.originals)
    for hook in hooks:
        hook.on = False
    try:
        yield model
    finally:
        _write(model, trained)
        for hook in hooks:
            hook.on = True


def _hooks(model: nn.Module) -> Iterator[_Extended]:
    for site in adapter_of(model).sites:
        for hook in model.get_submodule(site.projection)._forward_pre_hooks.values():
            if isinstance(hook, _Extended):
                yield hook


def _write(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)


def unload(model: nn.Module) -> nn.Module:
    """Take DEX out and restore the model that was there before, bit for bit.

    Returns:
        The model, with no module, hook or attribute of DEX; its parameters require gradients.

    Raises:
        UserError: the model has no DEX.
    """
    adapter = adapter_of(model)
    _write(model, {**(adapter.unmerged or {}), **adapter.originals})
    take_out(model)
    del model.__dict__["_dex"]
    model.requires_grad_(True)
    return model


def levels_of(model: nn.Module) -> list[float]:
    """Mean size of a few entries of each parameter: alike in every precision of one model."""
    levels = []
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            flat = parameter.detach().flatten()
            few = flat[:: max(1, flat.numel() // 256)]
            levels.append(float(few.float().abs().mean()) if few.numel() else 0.0)
    return levels


def fingerprint(model: nn.Module) -> str:
    """A hash of the names and shapes of a model's parameters, without those of DEX."""
    lines = [
        f"{name} {list(parameter.shape)}"
        for name, parameter in sorted(model.named_parameters())
        if f".{EXTENSION}." not in name
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
