"""What the operators' arguments must be; every refusal is one line that names the argument."""

import math

import torch
from torch import Tensor

from diffattn.ops.scoring import Scoring

AXES = "(batch, time, heads, width)"


def check_queries_keys(q: Tensor, k: Tensor) -> None:
    """Refuse queries and keys that are no tensors of 4 axes or do not fit each other."""
    _check_heads("q", q, q)
    if not q.is_floating_point():
        raise ValueError(f"q: expected a floating dtype, got {q.dtype}")
    _check_heads("k", k, q)
    batch, length, heads, width = q.shape
    keys, groups = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(
            f"k: expected {AXES} = ({batch}, S, G, {width}) to match q {tuple(q.shape)}, got "
            f"{tuple(k.shape)}"
        )
    if groups == 0 or heads % groups:
        raise ValueError(f"k: {groups} key/value heads do not divide the {heads} heads of q")
    if keys == 0:
        raise ValueError("k: expected at least one key, got S = 0")
    if length == 0 or width == 0:
        raise ValueError(
            f"q: expected at least one query of at least one channel, got T = {length}, D = {width}"
        )


def check_values(v: Tensor, k: Tensor) -> None:
    """Refuse values that do not fit the keys."""
    _check_heads("v", v, k)
    if v.shape[:3] != k.shape[:3]:
        expected = ", ".join(str(size) for size in k.shape[:3])
        raise ValueError(
            f"v: expected (batch, time, heads) = ({expected}) to match k, got {tuple(v.shape)}"
        )


def check_noise(q: Tensor, k: Tensor, q_noise: Tensor, k_noise: Tensor | None) -> None:
    """Refuse noise queries and keys that do not fit the signal's."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    _check_tensor("q_noise", q_noise)
    if q_noise.dim() != 4 or (*q_noise.shape[:2], q_noise.shape[3]) != (batch, length, width):
        raise ValueError(
            f"q_noise: expected {AXES} = ({batch}, {length}, N, {width}) to match q, got "
            f"{tuple(q_noise.shape)}"
        )
    if q_noise.dtype != q.dtype:
        raise ValueError(f"q_noise: expected dtype {q.dtype} as q, got {q_noise.dtype}")
    noise_heads = q_noise.shape[2]
    if noise_heads == 0 or heads % noise_heads:
        raise ValueError(f"q_noise: {noise_heads} noise heads do not divide {heads} signal heads")
    if noise_heads % groups:
        raise ValueError(
            f"q_noise: {groups} key/value heads do not divide {noise_heads} noise heads, so a "
            "pair would read two key/value heads"
        )
    if k_noise is None:
        return
    _check_tensor("k_noise", k_noise)
    if k_noise.shape != k.shape or k_noise.dtype != k.dtype:
        raise ValueError(
            f"k_noise: expected shape {tuple(k.shape)} and dtype {k.dtype} as k, got "
            f"{tuple(k_noise.shape)}, {k_noise.dtype}"
        )


def check_lam(lam: Tensor | float, q: Tensor) -> None:
    """Refuse a coefficient that is neither a number nor one a head nor one a token."""
    if not isinstance(lam, Tensor):
        if not isinstance(lam, (int, float)):
            raise ValueError(f"lam: expected a number or a tensor, got {type(lam).__name__}")
        return
    if lam.is_complex():
        raise ValueError(f"lam: expected a real tensor, got {lam.dtype}")
    batch, length, heads, _ = q.shape
    # compared axis by axis: an exported program must not tie the batch to the number of heads
    expected = {0: (), 1: (heads,), 3: (batch, length, heads)}.get(lam.dim())
    if expected is None or any(a != b for a, b in zip(lam.shape, expected, strict=True)):
        raise ValueError(
            f"lam: expected a number, [{heads}] or [{batch}, {length}, {heads}], got shape "
            f"{tuple(lam.shape)}"
        )


def check_sinks(
    sink: Tensor | None, sink_noise: Tensor | None, heads: int, noise_heads: int
) -> tuple[Tensor | None, Tensor | None]:
    """The sinks of both maps, or of neither."""
    if (sink is None) != (sink_noise is None):
        missing = "sink" if sink is None else "sink_noise"
        raise ValueError(f"{missing}: expected a sink for both maps or for neither, got None")
    check_sink("sink", sink, heads)
    check_sink("sink_noise", sink_noise, noise_heads)
    return sink, sink_noise


def check_sink(name: str, sink: Tensor | None, heads: int) -> None:
    """Refuse a sink that is not one logit a head."""
    if sink is None:
        return
    _check_tensor(name, sink)
    if tuple(sink.shape) != (heads,) or not sink.is_floating_point():
        raise ValueError(
            f"{name}: expected one floating logit a head, [{heads}], got {sink.dtype} of shape "
            f"{tuple(sink.shape)}"
        )


def check_numbers(window: int | None, softcap: float | None, dropout: float) -> None:
    """Refuse values of no meaning; layers ask when they are built."""
    whole = isinstance(window, int) and not isinstance(window, bool)
    if window is not None and not (whole and window >= 1):
        raise ValueError(f"window: expected a whole number, at least 1, got {window!r}")
    if softcap is not None and not (_is_finite(softcap) and softcap > 0):
        raise ValueError(f"softcap: expected a number above 0, got {softcap!r}")
    if not (_is_finite(dropout) and 0.0 <= dropout < 1.0):
        raise ValueError(f"dropout: expected a probability in [0, 1), got {dropout!r}")


def check_scoring(
    scoring: Scoring, q: Tensor, k: Tensor, *, noise_heads: int | None = None
) -> None:
    """Refuse what decides the weights where it has no meaning or does not fit the tensors.

    Args:
        scoring: the arguments.
        q: checked queries.
        k: checked keys.
        noise_heads: N, where there is a second map.
    """
    check_numbers(scoring.window, scoring.softcap, scoring.dropout)
    if scoring.scale is not None and not _is_finite(scoring.scale):
        raise ValueError(f"scale: expected a finite number, got {scoring.scale!r}")
    mask, heads = scoring.mask, q.shape[2]
    if mask is None:
        return
    _check_tensor("mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"mask: expected a bool or float tensor, got {mask.dtype}")
    full = (q.shape[0], heads, q.shape[1], k.shape[1])
    sizes = tuple(mask.shape)
    if not 1 <= len(sizes) <= 4 or any(
        size not in (1, whole) for size, whole in zip(sizes[::-1], full[::-1], strict=False)
    ):
        raise ValueError(f"mask: expected a shape that broadcasts to {full}, got {sizes}")
    if noise_heads not in (None, heads) and mask.dim() > 2 and mask.shape[-3] > 1:
        raise ValueError(
            f"mask: {heads // noise_heads} signal heads share a noise head, so the head axis "
            f"must be 1, got {sizes}"
        )


def _check_heads(name: str, tensor: Tensor, like: Tensor) -> None:
    _check_tensor(name, tensor)
    if tensor.dim() != 4:
        raise ValueError(f"{name}: expected 4 axes {AXES}, got shape {tuple(tensor.shape)}")
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name}: expected dtype {like.dtype} as q, got {tensor.dtype}")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)
