"""Attention by the compiled kernel: arguments are brought into the form it takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffattn.ops.fused.operators import fused_forward, run_forward
from diffattn.ops.fused.step import MOST_QUERIES, is_plain_call
from diffattn.ops.masks import added_and_used, blank_unseen
from diffattn.ops.scoring import Scoring


def fused_diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    scoring: Scoring,
    *,
    lam: Tensor | float,
    sinks: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Differential attention on a CPU, maps subtracted before the product with v, [B, T, H, E]."""
    work = torch.promote_types(q.dtype, torch.float32)
    lams = torch.as_tensor(lam, dtype=work, device=q.device).expand(q.shape[:3])
    return _attend(q, k, v, q_noise, k_noise, lams, scoring, sinks)


def fused_softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, sink: Tensor | None
) -> Tensor:
    """Softmax attention by the same kernel, [B, T, H, E]."""
    return _attend(q, k, v, None, None, None, scoring, (sink, None))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor | None,
    k_noise: Tensor | None,
    lam: Tensor | None,
    scoring: Scoring,
    sinks: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    if q.device.type != "cpu":
        raise NotImplementedError(f"impl='fused' runs on CPUs, got tensors on {q.device}")
    if scoring.mask is not None and scoring.mask.requires_grad:
        raise NotImplementedError("impl='fused' has no gradient of a mask: ask for impl='sdpa'")
    work = torch.promote_types(q.dtype, torch.float32)
    mask, used = added_and_used(
        scoring.mask, q.shape[1], k.shape[1], causal=scoring.causal, window=scoring.window
    )
    if mask is not None:
        mask = mask.to(work).expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    rows = [q, k, v, q_noise, k_noise]
    is_plain = is_plain_call(*rows, lam, *sinks)
    # few queries read keys and values where they lie, and none that is hidden
    if not is_plain or q.shape[1] > MOST_QUERIES:
        rows[1:3] = [blank_unseen(tensor, used) for tensor in (k, v)]
        rows[4] = None if k_noise is None else blank_unseen(k_noise, used)
    # what nobody differentiates or traces need not pass through torch's operators
    run: Callable[..., Any] = run_forward if is_plain else fused_forward
    out, _, _ = run(
        *(None if tensor is None else _dense(tensor, work) for tensor in rows),
        lam,
        mask,
        *(None if sink is None else sink.to(work).contiguous() for sink in sinks),
        scoring.causal,
        scoring.window or 0,
        scoring.factor(q.shape[-1]),
    )
    return out.to(q.dtype)


def _dense(tensor: Tensor, work: torch.dtype) -> Tensor:
    """In a dtype of the kernel, the width contiguous."""
    tensor = tensor if tensor.dtype == torch.bfloat16 else tensor.to(work)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
