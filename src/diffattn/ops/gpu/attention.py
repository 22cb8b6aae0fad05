"""Attention by the GPU kernels: arguments are brought into the form they take."""

import torch
from torch import Tensor

from diffattn.ops.arguments import (
    check_lam,
    check_noise,
    check_queries_keys,
    check_scoring,
    check_values,
)
from diffattn.ops.gpu.operators import gpu_forward, gpu_inference
from diffattn.ops.masks import additive_and_visible
from diffattn.ops.precision import own_precision
from diffattn.ops.scoring import Scoring

_Documents = tuple[Tensor | None, Tensor | None]


def gpu_diff_attention(
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
    """Differential attention on a GPU in one pass over the keys, [B, T, H, E]."""
    return _attend(q, k, v, q_noise, k_noise, scoring, lam, sinks, (None, None))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    scoring: Scoring,
    lam: Tensor | float,
    sinks: tuple[Tensor | None, Tensor | None],
    documents: _Documents,
    gain: Tensor | None = None,
    eps: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    if q.dtype == torch.float64:
        raise NotImplementedError(
            "impl='triton' computes in fp32, got torch.float64: ask for impl='reference' or 'sdpa'"
        )
    if scoring.mask is not None and scoring.mask.requires_grad:
        raise NotImplementedError("impl='triton' has no gradient of a mask: ask for impl='sdpa'")
    lams = torch.as_tensor(lam, dtype=torch.float32, device=q.device).expand(q.shape[:3])
    lams = lams.transpose(1, 2).contiguous()  # [B, H, T], as the log-sum-exps
    tensors = (
        *(_rows(tensor) for tensor in (q, k, v, q_noise)),
        None if k_noise is None else _rows(k_noise),
        lams,
        _mask(scoring, q, k),
        *(None if sink is None else sink.float().contiguous() for sink in sinks),
        *documents,
    )
    options = scoring.causal, scoring.window or 0, scoring.factor(q.shape[-1])
    needed = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
    if needed:
        return gpu_forward(*tensors, *options)[0]
    return gpu_inference(*tensors, gain, *options, eps, factor)


def _rows(tensor: Tensor) -> Tensor:
    """With its width contiguous, which the kernels read as vectors."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _mask(scoring: Scoring, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as numbers to add, [B, H, T, S] by strides."""
    bias, seen = additive_and_visible(scoring.mask)
    if seen is None:
        return None
    added = seen.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
    added = added.masked_fill(~seen, float("-inf"))
    return added.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def normed_diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None = None,
    *,
    lam: Tensor | float,
    gain: Tensor,
    factor: float,
    eps: float = 1e-5,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Differential attention with the head norm of V1 in the same kernel, without gradients.

        out = factor * gain * RMSNorm((softmax(q k^T s + M) - lam * softmax(q' k'^T s + M)) v)

    Args:
        q: as in `diff_attention`; so for what is not named here. On a GPU.
        k: as in `diff_attention`.
        v: as in `diff_attention`.
        q_noise: as in `diff_attention`.
        k_noise: as in `diff_attention`.
        lam: as in `diff_attention`.
        gain: [E] of the norm over the value width.
        factor: 1 - lambda_init.
        eps: of the norm.
        causal: as in `diff_attention`.
        window: as in `diff_attention`.
        mask: as in `diff_attention`.
        scale: as in `diff_attention`.

    Returns:
        [B, T, H, E] in the dtype of `q`; the norm is taken in fp32, before any rounding.

    Raises:
        ValueError: as in `diff_attention`; or `gain` is not [E].
        NotImplementedError: gradients are asked for, or as in `diff_attention`.

    Source: Ye et al., arXiv 2410.05258, Eq. 1 and 3.
    """
    scoring = Scoring(causal=causal, window=window, mask=mask, scale=scale)
    _check(q, k, v, q_noise, k_noise, lam, scoring)
    if gain.shape != v.shape[3:]:
        raise ValueError(f"gain: expected [{v.shape[3]}], got shape {tuple(gain.shape)}")
    given = (q, k, v, q_noise, k_noise, lam, gain)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given):
        raise NotImplementedError(
            "normed_diff_attention has no gradients: call diff_attention and the norm behind it"
        )
    with own_precision(q):
        return _attend(
            q, k, v, q_noise, k_noise, scoring, lam, (None, None), (None, None), gain, eps, factor
        )


def packed_diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None = None,
    *,
    lam: Tensor | float,
    documents: Tensor,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Differential attention inside each of the documents that a row packs; no mask is built.

    Keys of other documents are not read, but for the blocks in which two documents meet.

    Args:
        q: as in `diff_attention`; so for what is not named here. On a GPU.
        k: [B, T, G, D] signal keys, as long as the queries.
        v: as in `diff_attention`.
        q_noise: as in `diff_attention`.
        k_noise: as in `diff_attention`.
        lam: as in `diff_attention`.
        documents: [B, T] or [1, T] numbers that grow along a row, as `documents_of_lengths` (of
            cu_seqlens) and `documents_of_positions` give.
        causal: hide later keys.
        window: as in `diff_attention`.
        scale: as in `diff_attention`.

    Returns:
        [B, T, H, E] in the dtype of `q`, with gradients.

    Raises:
        ValueError: as in `diff_attention`; or `documents` does not fit.
        NotImplementedError: as in `diff_attention`.

    Source: our choice.
    """
    scoring = Scoring(causal=causal, window=window, scale=scale)
    _check(q, k, v, q_noise, k_noise, lam, scoring)
    batch, length = q.shape[:2]
    if k.shape[1] != length or documents.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"documents: expected [{batch}, {length}] or [1, {length}] for as many keys as "
            f"queries, got {tuple(documents.shape)} and {k.shape[1]} keys"
        )
    place = torch.arange(length, dtype=torch.int32, device=documents.device)
    starts = torch.nn.functional.pad(documents.diff() != 0, (1, 0), value=True)
    ends = torch.nn.functional.pad(documents.diff() != 0, (0, 1), value=True)
    first = torch.where(starts, place, 0).cummax(-1).values
    last = torch.where(ends, place, length).flip(-1).cummin(-1).values.flip(-1)
    found = (first.int(), (last + 1).int())
    of_rows = tuple(tensor.expand(batch, length).contiguous() for tensor in found)
    with own_precision(q):
        return _attend(
            q, k, v, q_noise, k_noise, scoring, lam, (None, None), (of_rows[0], of_rows[1])
        )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    lam: Tensor | float,
    scoring: Scoring,
) -> None:
    """Refuse what `diff_attention` refuses."""
    check_queries_keys(q, k)
    check_values(v, k)
    check_noise(q, k, q_noise, k_noise)
    check_lam(lam, q)
    check_scoring(scoring, q, k, noise_heads=q_noise.shape[2])
