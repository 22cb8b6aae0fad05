"""Attention layers of published code, as the tensors of `diffattn.nn.DiffAttention` and back.

A layout is an arrangement of heads and rotary channels under names of its own. Conversions move
rows and names; nothing is trained or approximated. Head counts follow from the shapes alone: the
lambda vectors are as long as a head is wide, or V2's projection has a row for each head.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from diffattn.errors import UserError
from diffattn.nn.lambdas import VECTORS
from diffattn.ops.layout import half_to_interleaved, interleaved_to_half

State = Mapping[str, Tensor]
Tensors = dict[str, Tensor]


class LayerLayout(NamedTuple):
    """How one published attention layer holds its tensors."""

    marker: str
    """a tensor that every such layer has, the last part of its name"""
    beside: str
    """another one under the same prefix, which other layouts lack"""
    rotary: str
    """"interleaved", "half" or "none": how its queries and keys are rotated"""
    to_ours: Callable[[State], Tensors]
    from_ours: Callable[[State, bool], Tensors]


def convert_layers(state: State, source: str, target: str, *, fold_gain: bool = False) -> Tensors:
    """Convert every attention layer in a state dict and leave all other tensors alone.

    Args:
        state: state dict of any model whose attention layers are of the layout `source`.
        source: "diffattn", "unilm-v1", "unilm-v2", "timm" or "phi4flash".
        target: another of these.
        fold_gain: multiply the gain of the head norm into the output projection and leave it
            out, where the target is "unilm-v1" built without a gain.

    Returns:
        The state dict with the layers' tensors converted; values are moved, not computed, unless
        a gain is folded.

    Raises:
        UserError: no layer of this layout is found, a tensor is missing, extra or of a shape that
            does not fit, or the target cannot hold what is there; the message names it.

    Source: microsoft/unilm `Diff-Transformer` (V1, V2), timm `layers/diff_attention.py`,
        Phi-4-mini-flash as ported by others (its query pairs are read as adjacent).
    """
    if source not in LAYER_LAYOUTS or target not in LAYER_LAYOUTS:
        wrong = source if source not in LAYER_LAYOUTS else target
        raise UserError(f"layout: expected one of {tuple(LAYER_LAYOUTS)}, got {wrong!r}")
    one, other = LAYER_LAYOUTS[source], LAYER_LAYOUTS[target]
    if "diffattn" not in (source, target) and one.rotary != other.rotary:
        raise UserError(
            f"layout: {source} has {one.rotary} rotary positions, {target} {other.rotary}"
        )
    converted = dict(state)
    prefixes = layers_of(state, source)
    if not prefixes:
        raise UserError(f"checkpoint: no attention layer of the layout {source} in it")
    for prefix in prefixes:
        names = [name for name in state if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): converted.pop(name) for name in names}
        try:
            moved = other.from_ours(one.to_ours(tensors), fold_gain)
        except UserError as error:
            raise UserError(
                f"checkpoint: layer {prefix.rstrip('.') or 'at the root'}: {error}"
            ) from error
        converted |= {prefix + name: tensor for name, tensor in moved.items()}
    return converted


def layers_of(state: State, layout: str) -> list[str]:
    """Prefixes of the attention layers of a layout in a state dict."""
    marker, beside = LAYER_LAYOUTS[layout][:2]
    found = []
    for name in state:
        prefix = name.removesuffix(marker)
        if prefix != name and prefix + beside in state and (not prefix or prefix.endswith(".")):
            found.append(prefix)
    return found


class _Reader:
    """Takes tensors out of one layer by name and shape; what is left over is too much."""

    def __init__(self, tensors: State) -> None:
        self.left = dict(tensors)

    def take(self, name: str, shape: tuple[int | None, ...] | None = None) -> Tensor:
        if name not in self.left:
            raise UserError(f"lacks {name}")
        tensor = self.left.pop(name)
        if shape is not None and (
            tensor.dim() != len(shape)
            or any(want not in (None, got) for want, got in zip(shape, tensor.shape, strict=True))
        ):
            wanted = [str(size or "any") for size in shape]
            raise UserError(
                f"expected {name} of shape ({', '.join(wanted)}), got {tuple(tensor.shape)}"
            )
        return tensor

    def maybe(self, name: str) -> Tensor | None:
        return self.left.pop(name, None)

    def end(self, layout: str) -> None:
        if self.left:
            raise UserError(f"{layout} has no place for {sorted(self.left)[0]}")


def _heads(name: str, rows: int, width: int) -> int:
    if rows % width:
        raise UserError(f"expected {name} of a multiple of {width} rows, got {rows}")
    return rows // width


def _v1_vectors(reader: _Reader, prefix: str = "") -> tuple[Tensors, int]:
    first = reader.take(f"{prefix}lambda_q1", (None,))
    width = first.shape[0]
    rest = {name: reader.take(f"{prefix}{name}", (width,)) for name in VECTORS[1:]}
    vectors = {"lambda_q1": first, **rest}
    return {f"lam.{name}": vector for name, vector in vectors.items()}, width


def _check_v1(query: Tensor, key: Tensor, value: Tensor, width: int, joined: int) -> None:
    """Pairs of query heads as wide as the output projection says, pairs of keys over values."""
    heads = _heads("the output projection's input", joined, 2 * width)
    if query.shape[0] != joined:
        raise UserError(
            f"expected {2 * heads} query heads of {width} for {heads} outputs of {2 * width}, got "
            f"{query.shape[0]} rows"
        )
    groups = _heads("keys", key.shape[0], 2 * width)
    if value.shape[0] != key.shape[0] or groups == 0 or heads % groups:
        raise UserError(
            f"expected {groups} value heads of {2 * width} that divide {heads} outputs, got "
            f"{value.shape[0]} rows"
        )


def _from_unilm_v1(tensors: State) -> Tensors:
    reader = _Reader(tensors)
    vectors, width = _v1_vectors(reader)
    query = reader.take("q_proj.weight", (None, None))
    hidden = query.shape[1]
    key = reader.take("k_proj.weight", (None, hidden))
    value = reader.take("v_proj.weight", (None, hidden))
    output = reader.take("out_proj.weight", (hidden, None))
    gain = reader.maybe("subln.weight")
    reader.end("unilm-v1")
    _check_v1(query, key, value, width, output.shape[1])
    return {
        "q_proj.weight": interleaved_to_half(query, width),
        "k_proj.weight": interleaved_to_half(key, width),
        "v_proj.weight": value,
        "o_proj.weight": output,
        "subln.weight": output.new_ones(2 * width) if gain is None else gain,
        **vectors,
    }


def _plain_v1(reader: _Reader, layout: str) -> tuple[Tensors, int, Tensor]:
    """Vectors, head width and gain of one of our layers, if it is a V1 layer as published."""
    if "lam.lambda_proj.weight" in reader.left:
        raise UserError(f"{layout} holds V1 alone, and lam here comes from each token")
    if "g_proj.weight" in reader.left:
        raise UserError(f"{layout} has no output gate")
    if "sinks" in reader.left:
        raise UserError(f"{layout} has no attention sinks")
    if "subln.weight" not in reader.left:
        raise UserError(f"{layout} norms each head, and this layer does not")
    if (vector := reader.left.get("lam.lambda_q1")) is not None and vector.dim() != 1:
        raise UserError(f"{layout} has one lam a layer, and this layer {vector.shape[0]}")
    vectors, width = _v1_vectors(reader, "lam.")
    gain = reader.take("subln.weight", (2 * width,))
    return {name.removeprefix("lam."): t for name, t in vectors.items()}, width, gain


def _to_unilm_v1(tensors: State, fold_gain: bool) -> Tensors:
    reader = _Reader(tensors)
    vectors, width, gain = _plain_v1(reader, "unilm-v1")
    query, key, value, output = (reader.take(f"{n}_proj.weight") for n in "qkvo")
    reader.end("unilm-v1")
    _check_v1(query, key, value, width, output.shape[1])
    converted = {
        "q_proj.weight": half_to_interleaved(query, width),
        "k_proj.weight": half_to_interleaved(key, width),
        "v_proj.weight": value,
        "out_proj.weight": fold(output, gain) if fold_gain else output,
        **vectors,
    }
    return converted if fold_gain else {**converted, "subln.weight": gain}


def fold(output: Tensor, gain: Tensor) -> Tensor:
    """The output projection with the head norm's gain in it.

        W_O[:, h, c] <- W_O[:, h, c] gain[c]

    Args:
        output: [hidden, H E] weight.
        gain: [E], shared by the heads.
    """
    return (output.unflatten(1, (-1, gain.shape[0])) * gain.to(output)).flatten(1)


def _from_unilm_v2(tensors: State) -> Tensors:
    reader = _Reader(tensors)
    projection = reader.take("lambda_proj.weight", (None, None))
    heads, hidden = projection.shape
    query = reader.take("q_proj.weight", (None, hidden))
    _heads("q_proj.weight", query.shape[0], 2 * heads)
    width = query.shape[0] // (2 * heads)
    key = reader.take("k_proj.weight", (None, hidden))
    groups = _heads("k_proj.weight", key.shape[0], width)
    if groups == 0 or heads % groups:
        raise UserError(f"expected key heads that divide {heads} output heads, got {groups}")
    value = reader.take("v_proj.weight", (groups * width, hidden))
    output = reader.take("o_proj.weight", (hidden, heads * width))
    reader.end("unilm-v2")
    return {
        "q_proj.weight": interleaved_to_half(query, width),
        "k_proj.weight": interleaved_to_half(key, width),
        "v_proj.weight": value,
        "o_proj.weight": output,
        "lam.lambda_proj.weight": projection,
    }


def _to_unilm_v2(tensors: State, fold_gain: bool) -> Tensors:
    reader = _Reader(tensors)
    if "lam.lambda_proj.weight" not in reader.left:
        raise UserError("unilm-v2 holds V2 alone, and lam here is a learned number")
    if "subln.weight" in reader.left:
        raise UserError("unilm-v2 has no norm of the heads")
    projection = reader.take("lam.lambda_proj.weight", (None, None))
    heads = projection.shape[0]
    query, key, value, output = (reader.take(f"{n}_proj.weight") for n in "qkvo")
    reader.end("unilm-v2")
    width = output.shape[1] // heads
    if query.shape[0] != 2 * heads * width:
        raise UserError(
            f"unilm-v2 has a noise head for each of {heads} signal heads, got {query.shape[0]} "
            f"query rows of width {width}"
        )
    groups = _heads("k_proj.weight", key.shape[0], width)
    if value.shape[0] != key.shape[0] or groups == 0 or heads % groups:
        raise UserError(
            f"unilm-v2 has one key and one value head of {width} for each of a divisor of {heads} "
            f"signal heads, got {key.shape[0]} and {value.shape[0]} rows"
        )
    return {
        "q_proj.weight": half_to_interleaved(query, width),
        "k_proj.weight": half_to_interleaved(key, width),
        "v_proj.weight": value,
        "o_proj.weight": output,
        "lambda_proj.weight": projection,
    }


def _from_timm(tensors: State) -> Tensors:
    reader = _Reader(tensors)
    if "norm.weight" in reader.left:
        raise UserError("our layer has no norm before the output projection (scale_norm)")
    gain = reader.take("sub_norm.weight", (None,))
    width = gain.shape[0] // 2
    if "lambda_a" in reader.left:  # two numbers in place of two dot products
        vectors = {}
        for name, number in (("1", "lambda_a"), ("2", "lambda_b")):
            value = reader.take(number, ())
            precision = torch.promote_types(value.dtype, torch.float32)
            unit, scaled = gain.new_zeros(2, width, dtype=precision)
            unit[0], scaled[0] = 1.0, value
            vectors |= {f"lam.lambda_q{name}": unit, f"lam.lambda_k{name}": scaled}
    else:
        vectors, width = _v1_vectors(reader)
    fused = reader.take("qkv.weight", (None, None))
    hidden = fused.shape[1]
    if fused.shape[0] != 3 * hidden:
        raise UserError(f"expected qkv.weight of {3 * hidden} rows, got {fused.shape[0]}")
    query, key, value = fused.chunk(3)
    converted = {
        "q_proj.weight": query,
        "k_proj.weight": key,
        "v_proj.weight": value,
        "o_proj.weight": reader.take("proj.weight", (hidden, hidden)),
        "subln.weight": gain,
        **vectors,
    }
    _check_v1(query, key, value, width, hidden)
    if (bias := reader.maybe("qkv.bias")) is not None:
        converted |= dict(zip((f"{n}_proj.bias" for n in "qkv"), bias.chunk(3), strict=True))
    if (bias := reader.maybe("proj.bias")) is not None:
        converted["o_proj.bias"] = bias
    for name in ("q_norm.weight", "k_norm.weight"):
        if (norm := reader.maybe(name)) is not None:
            converted[name] = norm
    reader.end("timm")
    return {name: tensor.contiguous() for name, tensor in converted.items()}


def _to_timm(tensors: State, fold_gain: bool) -> Tensors:
    reader = _Reader(tensors)
    vectors, width, gain = _plain_v1(reader, "timm")
    query, key, value, output = (reader.take(f"{n}_proj.weight") for n in "qkvo")
    _check_v1(query, key, value, width, output.shape[1])
    if len({tuple(part.shape) for part in (query, key, value, output)}) != 1:
        raise UserError("timm has as many key heads as query heads, together as wide as the model")
    fused = torch.cat((query, key, value))
    converted = {"qkv.weight": fused, "proj.weight": output, "sub_norm.weight": gain}
    if "q_proj.bias" in reader.left:
        converted["qkv.bias"] = torch.cat([reader.take(f"{n}_proj.bias") for n in "qkv"])
    for ours, theirs in (
        ("o_proj.bias", "proj.bias"),
        ("q_norm.weight", "q_norm.weight"),
        ("k_norm.weight", "k_norm.weight"),
    ):
        if (tensor := reader.maybe(ours)) is not None:
            converted[theirs] = tensor
    reader.end("timm")
    return {**converted, **vectors}


def _from_phi4flash(tensors: State) -> Tensors:
    reader = _Reader(tensors)
    vectors, width = _v1_vectors(reader, "inner_cross_attn.")
    gain = reader.take("inner_cross_attn.subln.weight", (2 * width,))
    output = reader.take("out_proj.weight", (None, None))
    hidden, joined = output.shape
    fused, bias = reader.take("Wqkv.weight", (None, hidden)), reader.take("Wqkv.bias", (None,))
    rest = fused.shape[0] - joined
    if rest < 0 or rest % (4 * width):
        raise UserError(
            f"expected Wqkv.weight of {joined} query rows and key and value pairs of {width}, got "
            f"{fused.shape[0]} rows"
        )
    names = ("q", "k", "v") if rest else ("q",)  # a layer that reads another's keys has q alone
    sizes = (joined, rest // 2, rest // 2) if rest else (joined,)
    weights, biases = fused.split(sizes), bias.split(sizes)
    if rest:
        _check_v1(weights[0], weights[1], weights[2], width, joined)
    converted = {
        **{f"{name}_proj.weight": t.contiguous() for name, t in zip(names, weights, strict=True)},
        **{f"{name}_proj.bias": t.contiguous() for name, t in zip(names, biases, strict=True)},
        "o_proj.weight": output,
        "o_proj.bias": reader.take("out_proj.bias", (hidden,)),
        "subln.weight": gain,
        **vectors,
    }
    reader.end("phi4flash")
    return converted


def _to_phi4flash(tensors: State, fold_gain: bool) -> Tensors:
    reader = _Reader(tensors)
    vectors, _, gain = _plain_v1(reader, "phi4flash")
    names = [n for n in "qkv" if f"{n}_proj.weight" in reader.left]
    converted = {
        "Wqkv.weight": torch.cat([reader.take(f"{n}_proj.weight") for n in names]),
        "Wqkv.bias": torch.cat([reader.take(f"{n}_proj.bias") for n in names]),
        "out_proj.weight": reader.take("o_proj.weight"),
        "out_proj.bias": reader.take("o_proj.bias"),
        "inner_cross_attn.subln.weight": gain,
        **{f"inner_cross_attn.{name}": vector for name, vector in vectors.items()},
    }
    reader.end("phi4flash")
    return converted


def _ours(tensors: State, fold_gain: bool = False) -> Tensors:
    return dict(tensors)


LAYER_LAYOUTS = {
    "diffattn": LayerLayout("q_proj.weight", "o_proj.weight", "half", _ours, _ours),
    "unilm-v1": LayerLayout(
        "lambda_q1", "out_proj.weight", "interleaved", _from_unilm_v1, _to_unilm_v1
    ),
    "unilm-v2": LayerLayout(
        "lambda_proj.weight", "o_proj.weight", "interleaved", _from_unilm_v2, _to_unilm_v2
    ),
    "timm": LayerLayout("sub_norm.weight", "qkv.weight", "none", _from_timm, _to_timm),
    "phi4flash": LayerLayout(
        "inner_cross_attn.lambda_q1", "Wqkv.weight", "none", _from_phi4flash, _to_phi4flash
    ),
}
