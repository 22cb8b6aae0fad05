"""Where a decoder's heads end: output projections of attention, found by what they compute.

No model is known by name. A layer is run by itself on random hidden states, and derivatives say
what its linear maps do:

- the *output projection* is the first linear map whose input at the last token depends on other
  tokens: attention has happened before it;
- *keys and values* are those outputs of earlier linear maps at earlier tokens that the output
  projection's last input depends on; a query, a gate or a lam acts on its own token alone.

So fused and interleaved projections, latent attention, transposed weights and differential heads
need no case of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffattn.errors import UserError
from diffattn.nn.layer import AttentionLayer

_TOKENS = 6


@dataclass(frozen=True)
class Site:
    """The attention of one decoder layer.

    Args:
        layer: index of the layer from 0.
        projection: name of the output projection W_O in the model.
        num_heads: heads H of its input.
        value_dim: width d_v of one head; H d_v is the input's width.
        transposed: the weight is [in, out], as in GPT-2, not [out, in].
        keys_values: name of each linear map that writes keys or values, with the rows (outputs)
            that do, or None where all do.
    """

    layer: int
    projection: str
    num_heads: int
    value_dim: int
    transposed: bool
    keys_values: dict[str, Tensor | None]


@dataclass
class _Call:
    """One linear map in the order of execution: its input as [B, T, width], its output as it is."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor


def find_sites(model: nn.Module) -> list[Site]:
    """Find the output projection of every decoder layer, its heads, its keys and values.

    Args:
        model: a causal language model of transformers, on a device that can run it.

    Returns:
        One site for each layer, in order.

    Raises:
        UserError: there is no list of decoder layers, a layer has no attention, or layers differ;
            the message lists what was found.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2)
        >>> site, = find_sites(LlamaForCausalLM(config))
        >>> site.projection, site.num_heads, site.value_dim
        ('model.layers.0.self_attn.o_proj', 2, 8)
    """
    names = {module: name for name, module in model.named_modules()}
    with evaluating(model), torch.enable_grad():
        calls = _layer_calls(model)
        found = [_site(model, names, index, *call) for index, call in enumerate(calls)]
    _check_alike(model, found)
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is in evaluation mode; modes and random numbers come back.

    Yields:
        Nothing.
    """
    training = {module: module.training for module in model.modules()}
    generator = torch.get_rng_state()
    model.eval()
    try:
        yield
    finally:
        torch.set_rng_state(generator)
        for module, mode in training.items():
            module.training = mode


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UserError(
            f"model: expected a causal language model of transformers, got {type(model).__name__}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model: expected a decoder, got {type(model).__name__}, which has two")
    return config.get_text_config(decoder=True)


def _layer_calls(model: nn.Module) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Each decoder layer with the arguments that a pass over a few tokens gives it."""
    config = _text_config(model)
    depth = config.num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    recorded: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorded.setdefault(module, (args, kwargs))

    layers = [layer for _, found in lists for layer in found]
    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    parameter = next(model.parameters())
    if parameter.device.type == "meta":
        raise UserError("model: expected weights on a device, got a model on meta")
    ids = torch.arange(_TOKENS, device=parameter.device)[None] % config.vocab_size
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for _, found in lists:
        if all(layer in recorded and _hidden(*recorded[layer]) is not None for layer in found):
            return [(layer, *recorded[layer]) for layer in found]
    raise UserError(
        f"model: expected a list of {depth} decoder layers that take hidden states, got "
        f"{[name for name, _ in lists] or 'no list of that length'} in {type(model).__name__}"
    )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    is_states = isinstance(hidden, Tensor) and hidden.dim() == 3 and hidden.is_floating_point()
    return hidden if is_states else None


def _site(
    model: nn.Module,
    names: dict[nn.Module, str],
    index: int,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Site:
    hidden = _hidden(args, kwargs)
    assert hidden is not None
    torch.manual_seed(0)
    size = hidden.float().square().mean().sqrt().clamp(min=1e-3).to(hidden.dtype)
    states = (torch.randn_like(hidden) * size).requires_grad_()
    calls = _run(names, layer, states, args, kwargs)
    position = next((n for n, call in enumerate(calls) if _sees_others(call.x, states)), None)
    where = f"layer {index} ({type(layer).__name__})"
    if position is None:
        raise UserError(f"model: {where} has no linear map behind attention; {_listed(calls)}")
    projection, before = calls[position], calls[:position]
    columns = _channels(projection.x, before, earlier=True)
    if not any(mask.any() for mask in columns):
        raise UserError(f"model: {where} has no keys and values; {_listed(calls)}")
    if projection.y.shape[-1] != hidden.shape[-1]:
        raise UserError(
            f"model: {where} has no attention: {projection.name}, the first map that reads other "
            f"tokens, gives {projection.y.shape[-1]} channels, expected {hidden.shape[-1]}"
        )
    heads = _heads(model, projection, before, columns)
    return Site(
        layer=index,
        projection=projection.name,
        num_heads=heads,
        value_dim=projection.x.shape[-1] // heads,
        transposed=_is_transposed(projection),
        keys_values={
            call.name: None if mask.all() else mask
            for call, mask in zip(before, columns, strict=True)
            if mask.any()
        },
    )


def _run(
    names: dict[nn.Module, str],
    layer: nn.Module,
    states: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[_Call]:
    calls: list[_Call] = []
    shape = states.shape[:2]

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        x = inputs[0] if inputs else None
        if isinstance(x, Tensor) and isinstance(output, Tensor):
            tokens = shape[0] * shape[1]
            if x.numel() // x.shape[-1] == tokens == output.numel() // output.shape[-1]:
                calls.append(_Call(names[module], module, x.reshape(*shape, -1), output))

    linear = [m for m in layer.modules() if _is_linear(m)]
    handles = [module.register_forward_hook(record) for module in linear]
    if args:
        args = (states, *args[1:])
    else:
        kwargs = {**kwargs, "hidden_states": states}
    try:
        with torch.enable_grad():
            layer(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_leaf = next(module.children(), None) is None
    return is_leaf and weight is not None and weight.dim() == 2 and "Embedding" not in str(module)


def _sees_others(x: Tensor, states: Tensor) -> bool:
    """Whether the last token of x depends on earlier tokens of the hidden states."""
    if not x.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(
        _drawn_sum(x[:, -1]), states, retain_graph=True, allow_unused=True
    )
    return gradient is not None and bool(gradient[:, :-1].any())


def _channels(x: Tensor, calls: list[_Call], *, earlier: bool) -> list[Tensor]:
    """For each map, which outputs the last token of x depends on, at earlier or at its token."""
    if not calls:
        return []
    gradients = torch.autograd.grad(
        _drawn_sum(x[:, -1]), [call.y for call in calls], retain_graph=True, allow_unused=True
    )
    place = slice(None, -1) if earlier else slice(-1, None)
    return [
        torch.zeros(call.y.shape[-1], dtype=torch.bool)
        if gradient is None
        else gradient.reshape(*x.shape[:2], -1)[:, place].ne(0).any(0).any(0).cpu()
        for call, gradient in zip(calls, gradients, strict=True)
    ]


def _drawn_sum(x: Tensor) -> Tensor:
    return (x.float() * torch.randn(x.shape, device=x.device)).sum()


def _heads(
    model: nn.Module, projection: _Call, before: list[_Call], keys_values: list[Tensor]
) -> int:
    """Heads in the input of the output projection.

    Parts of it that read the same queries are one head (a differential head is wider than the
    heads of its maps); where all read all, as behind a norm over all queries, the configuration
    decides.
    """
    parent = model.get_submodule(projection.name.rpartition(".")[0])
    if isinstance(parent, AttentionLayer):
        return projection.x.shape[-1] // parent.value_dim
    width, parts = projection.x.shape[-1], getattr(_text_config(model), "num_attention_heads", None)
    if not isinstance(parts, int) or width % parts:
        raise UserError(
            f"model: the configuration's num_attention_heads: expected a divisor of {width}, the "
            f"width of {projection.name}, got {parts}"
        )
    read = []
    for part in projection.x.unflatten(-1, (parts, -1)).unbind(2):
        own = _channels(part, before, earlier=False)
        queries = [mask & ~kv for mask, kv in zip(own, keys_values, strict=True)]
        read.append(torch.cat(queries))
    overlap = torch.stack(read).float() @ torch.stack(read).float().T > 0
    sizes = overlap.sum(0).unique().tolist()
    whole = len(sizes) == 1 and 1 < sizes[0] < parts and overlap.unique(dim=0).shape[0] > 1
    return parts // int(sizes[0]) if whole else parts


def _is_transposed(call: _Call) -> bool:
    weight: Any = call.module.weight
    bias: Any = getattr(call.module, "bias", None)
    if not weight.is_floating_point() or set(weight.shape) != {call.x.shape[-1], call.y.shape[-1]}:
        raise UserError(
            f"model: {call.name} is quantised ({type(call.module).__name__}): load the model in "
            "fp32 or bf16"
        )
    x, y = call.x.detach().float(), call.y.detach().float()
    y = y.reshape(*x.shape[:2], -1)
    y = y if bias is None else y - bias.detach().float()
    errors = {}
    for transposed in (False, True):
        matrix = weight.detach().float() if transposed else weight.detach().float().T
        if matrix.shape[0] == x.shape[-1]:
            errors[transposed] = (x @ matrix - y).abs().max().item()
    return min(errors, key=lambda transposed: errors[transposed])


def _listed(calls: list[_Call]) -> str:
    shapes = (f"{c.name} [{c.x.shape[-1]} -> {c.y.shape[-1]}]" for c in calls)
    return "linear maps found: " + (", ".join(shapes) or "none")


def _check_alike(model: nn.Module, sites: list[Site]) -> None:
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for site in sites:
        module = model.get_submodule(site.projection)
        relative = site.projection.split(f".{site.layer}.", 1)[-1]
        kinds.setdefault((relative, type(module).__name__), []).append(site.layer)
    if len(kinds) > 1:
        listed = "; ".join(f"layers {layers}: {kind[0]}" for kind, layers in kinds.items())
        raise UserError(f"model: expected attention alike in all layers, found {listed}")
