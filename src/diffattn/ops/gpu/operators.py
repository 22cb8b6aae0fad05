"""The GPU kernels as operators of torch, which autograd, compile and export know."""

import os
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK = 128
"""chunks of keys are multiples of it, which every block of keys divides"""
_SPLITS = 64


class Inputs(NamedTuple):
    """The tensors of a call, as every operator takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_noise: Tensor
    k_noise: Tensor | None
    lam: Tensor
    mask: Tensor | None
    sink: Tensor | None
    sink_noise: Tensor | None
    doc_first: Tensor | None
    doc_end: Tensor | None

    def arguments(self, causal: bool, window: int) -> dict[str, Any]:
        """What all kernels over keys take, by name; an absent tensor is an address never read."""
        q, k, v, q_noise, lam = self.q, self.k, self.v, self.q_noise, self.lam
        k_noise = k if self.k_noise is None else self.k_noise
        found: dict[str, Any] = {"q": q, "k": k, "v": v, "q_noise": q_noise, "k_noise": k_noise}
        found["mask"] = lam if self.mask is None else self.mask
        axes = {"q": "bth", "k": "bsg", "v": "bsg", "q2": "btn", "k2": "bsg"}
        for (name, letters), tensor in zip(axes.items(), (q, k, v, q_noise, k_noise), strict=True):
            found |= {f"{name}_{axis}": tensor.stride(n) for n, axis in enumerate(letters)}
        for n, axis in enumerate("bhts"):
            found[f"mask_{axis}"] = 0 if self.mask is None else self.mask.stride(n)
        found |= {"T": q.shape[1], "S": k.shape[1], "H": q.shape[2]}
        found |= {"N": q_noise.shape[2], "G": k.shape[2], "D": q.shape[3], "E": v.shape[3]}
        found |= {"CAUSAL": causal, "WINDOW": window > 0, "window": window}
        found |= {"PACKED": self.doc_first is not None, "MASK": self.mask is not None}
        found["reach"] = min(1 << max(q.shape[1], k.shape[1]).bit_length(), 1 << 14)
        found["OWN_KEY"] = self.k_noise is not None
        found |= {"BLOCK_D": _block(q.shape[3]), "BLOCK_E": _block(v.shape[3])}
        # of fp32 inputs alone, as torch's own products
        exact = torch.get_float32_matmul_precision() == "highest"
        found["PRECISION"] = "ieee" if exact else "tf32"
        return found

    def documents(self) -> dict[str, Tensor]:
        """First and end of each query's document."""
        first, end = self.doc_first, self.doc_end
        return {
            "doc_first": self.lam if first is None else first,
            "doc_end": self.lam if end is None else end,
        }

    def sinks(self) -> dict[str, Any]:
        """Logits of the sinks."""
        sink, noise = self.sink, self.sink_noise
        return {
            "sink": self.lam if sink is None else sink,
            "sink_noise": self.lam if noise is None else noise,
            "SINK": sink is not None,
        }

    def norm(self, gain: Tensor | None, eps: float, factor: float) -> dict[str, Any]:
        """The head norm behind the difference."""
        return {
            "gain": self.lam if gain is None else gain,
            "eps": eps,
            "factor": factor,
            "NORM": gain is not None,
        }


def _block(width: int) -> int:
    """The power of two that a tile of this width takes."""
    return max(16, 1 << (width - 1).bit_length())


def _kernels(device: torch.device) -> ModuleType:
    """The module of kernels, which needs Triton, imported on first use."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotImplementedError(
            f"impl='triton' runs on GPUs, got tensors on {device}: ask for impl='fused' or 'sdpa', "
            "or set TRITON_INTERPRET=1 to test its kernels"
        )
    try:
        from diffattn.ops.gpu import kernels
    except ModuleNotFoundError as error:
        raise NotImplementedError(
            f"impl='triton' needs the package `{error.name}`: pip install 'diffattn[triton]'"
        ) from error
    return kernels


def _launch(kernel: Any, grid: Any, device: torch.device, arguments: dict[str, Any]) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](**arguments)
    else:
        kernel[grid](**arguments)


@torch.library.custom_op("diffattn::gpu_forward", mutates_args=())
def gpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    lam: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    sink_noise: Tensor | None,
    doc_first: Tensor | None,
    doc_end: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [B, T, H, E], noise output [B, T, N, E], log-sum-exps [B, H, T] and [B, N, T]."""
    inputs = Inputs(*(q, k, v, q_noise, k_noise, lam, mask, sink, sink_noise, doc_first, doc_end))
    found = _forward_shapes(q, v, q_noise)
    _forward(inputs, found, causal, window, scale, inputs.norm(None, 0.0, 1.0))
    return found


def _forward(
    inputs: Inputs,
    found: tuple[Tensor, ...],
    causal: bool,
    window: int,
    scale: float,
    norm: dict[str, Any],
) -> None:
    batch, length, heads = inputs.q.shape[:3]
    arguments = inputs.arguments(causal, window) | inputs.documents()
    arguments |= inputs.sinks() | norm | {"scale": scale, "lam": inputs.lam, "SAVE": len(found) > 1}
    names = ("out", "noise_out", "lse", "lse_noise")
    arguments |= dict(zip(names, (*found, *[found[0]] * 3), strict=False))
    _launch(
        _kernels(inputs.q.device).forward,
        lambda chosen: (-(-length // chosen["BLOCK_M"]), batch * heads),
        inputs.q.device,
        arguments,
    )


def _forward_shapes(q: Tensor, v: Tensor, q_noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, length, heads = q.shape[:3]
    noise_heads = q_noise.shape[2]
    return (
        q.new_empty(batch, length, heads, v.shape[3]),
        q.new_empty(batch, length, noise_heads, v.shape[3]),
        q.new_empty(batch, heads, length, dtype=torch.float32),
        q.new_empty(batch, noise_heads, length, dtype=torch.float32),
    )


@gpu_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, q_noise: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _forward_shapes(q, v, q_noise)


@torch.library.custom_op("diffattn::gpu_backward", mutates_args=())
def gpu_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    lam: Tensor,
    mask: Tensor | None,
    doc_first: Tensor | None,
    doc_end: Tensor | None,
    out: Tensor,
    noise_out: Tensor,
    lse: Tensor,
    lse_noise: Tensor,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, q_noise, k_noise, and sum_j P dP of both maps, [B, H, T]."""
    kernels = _kernels(q.device)
    inputs = Inputs(q, k, v, q_noise, k_noise, lam, mask, None, None, doc_first, doc_end)
    found = _backward_shapes(q, k, v, q_noise, k_noise)
    d_q, d_k, d_v, d_q_noise, d_k_noise, delta, delta_noise = found
    batch, length, heads = q.shape[:3]
    noise_heads, keys, groups = q_noise.shape[2], k.shape[1], k.shape[2]
    saved = {"d_out": d_out, "lam": lam, "delta": delta, "delta_noise": delta_noise}
    rows = 32
    _launch(
        kernels.sums,
        (-(-length // rows), batch * heads),
        q.device,
        {
            **saved,
            "out": out,
            "noise_out": noise_out,
            "T": length,
            "H": heads,
            "N": noise_heads,
            "E": v.shape[3],
            "BLOCK_E": _block(v.shape[3]),
            "BLOCK_M": rows,
        },
    )
    saved |= {"lse": lse, "lse_noise": lse_noise, "scale": scale}
    saved |= inputs.arguments(causal, window) | inputs.documents()
    _launch(
        kernels.key_gradients,
        lambda chosen: (-(-keys // chosen["BLOCK_N"]), batch * groups),
        q.device,
        saved | {"d_k": d_k, "d_k_noise": d_k_noise, "d_v": d_v},
    )
    _launch(
        kernels.query_gradients,
        lambda chosen: (-(-length // chosen["BLOCK_M"]), batch * noise_heads),
        q.device,
        saved | {"d_q": d_q, "d_q_noise": d_q_noise},
    )
    return found


def _backward_shapes(
    q: Tensor, k: Tensor, v: Tensor, q_noise: Tensor, k_noise: Tensor | None
) -> Any:
    batch, length, heads = q.shape[:3]
    return (
        *(tensor.new_empty(tensor.shape) for tensor in (q, k, v, q_noise)),
        k.new_empty((0, *k.shape[1:]) if k_noise is None else k.shape),
        q.new_empty(batch, heads, length, dtype=torch.float32),
        q.new_empty(batch, heads, length, dtype=torch.float32),
    )


@gpu_backward.register_fake
def _(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    *rest: Any,
) -> Any:
    return _backward_shapes(q, k, v, q_noise, k_noise)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, *of_rest: Any) -> tuple[Tensor | None, ...]:
    """The rule of autograd; nothing differentiates what is saved beside the output.

    d lam = -sum_j P2 dP;  d sink = -p_sink sum_j P1 dP,  p_sink = exp(sink - lse), and for the
    noise map with the factor -lam.
    """
    if d_out is None:
        return (None,) * 14
    *tensors, out, noise_out, lse, lse_noise = ctx.saved_tensors
    inputs = Inputs(*tensors)
    d_q, d_k, d_v, d_q_noise, d_k_noise, delta, delta_noise = gpu_backward(
        *(d_out.contiguous(), *inputs[:7], inputs.doc_first, inputs.doc_end),
        *(out, noise_out, lse, lse_noise, ctx.causal, ctx.window, ctx.scale),
    )
    d_sink = d_sink_noise = None
    if inputs.sink is not None and inputs.sink_noise is not None:
        log2e = torch.tensor(1.0, device=lse.device).exp().log2()
        d_sink = -((inputs.sink[:, None] * log2e - lse).exp2() * delta).sum((0, 2))
        weighed = (inputs.lam * delta_noise).unflatten(1, (lse_noise.shape[1], -1)).sum(2)
        share = (inputs.sink_noise[:, None] * log2e - lse_noise).exp2()
        d_sink_noise = (share * weighed).sum((0, 2))
    return (
        *(d_q, d_k, d_v, d_q_noise, None if inputs.k_noise is None else d_k_noise),
        *(-delta_noise, None, d_sink, d_sink_noise, None, None),
        *(None, None, None),
    )


gpu_forward.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op("diffattn::gpu_inference", mutates_args=())
def gpu_inference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    lam: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    sink_noise: Tensor | None,
    doc_first: Tensor | None,
    doc_end: Tensor | None,
    gain: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    eps: float,
    factor: float,
) -> Tensor:
    """Output [B, T, H, E] without gradients, and with a gain its head norm, times `factor`."""
    inputs = Inputs(*(q, k, v, q_noise, k_noise, lam, mask, sink, sink_noise, doc_first, doc_end))
    out = q.new_empty(*q.shape[:3], v.shape[3])
    norm = inputs.norm(gain, eps, factor)
    rows = q.shape[1] * (q.shape[2] // k.shape[2])
    if rows <= 64 and doc_first is None:
        _split_forward(inputs, out, causal, window, scale, norm)
    else:
        _forward(inputs, (out,), causal, window, scale, norm)
    return out


@gpu_inference.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _split_forward(
    inputs: Inputs, out: Tensor, causal: bool, window: int, scale: float, norm: dict[str, Any]
) -> None:
    """Few queries behind many keys: chunks of keys side by side, then their sum."""
    kernels = _kernels(inputs.q.device)
    q, k = inputs.q, inputs.k
    batch, length, heads = q.shape[:3]
    keys, groups, width = k.shape[1], k.shape[2], out.shape[3]
    rows = length * (heads // groups)
    block = max(16, 1 << (rows - 1).bit_length())
    first = max(0, keys - length - window + 1) if window else 0
    first = first // _CHUNK * _CHUNK
    splits = _splits(keys - first, batch * groups, q.device)
    chunk = -(-(keys - first) // (splits * _CHUNK)) * _CHUNK
    splits = -(-(keys - first) // chunk)
    parts = q.new_empty(2, splits, batch, heads, length, width, dtype=torch.float32)
    lse = q.new_empty(2, splits, batch, heads, length, dtype=torch.float32)
    joint = {"lse": lse[0], "lse_noise": lse[1]}
    _launch(
        kernels.split_forward,
        (splits, 1, batch * groups),
        q.device,
        inputs.arguments(causal, window)
        | joint
        | {"signal_out": parts[0], "noise_out": parts[1], "scale": scale}
        | {"first_key": first, "chunk": chunk, "BLOCK_M": block},
    )
    count = batch * heads * length
    _launch(
        kernels.join,
        (count,),
        q.device,
        {"signal_parts": parts[0], "noise_parts": parts[1], "out": out, "rows": count}
        | {
            "lam": inputs.lam,
            "T": length,
            "H": heads,
            "N": inputs.q_noise.shape[2],
            "splits": splits,
        }
        | {"E": width, "BLOCK_E": _block(width), "SPLITS": 1 << (splits - 1).bit_length()}
        | joint
        | inputs.sinks()
        | norm,
    )


def _splits(keys: int, programs: int, device: torch.device) -> int:
    """So many chunks that two programs stand for each processor."""
    processors = 8
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // programs, -(-keys // _CHUNK), _SPLITS))
