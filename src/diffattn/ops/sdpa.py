"""Torch's scaled-dot-product kernel, one call for each map; memory linear in length."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffattn.ops.difference import subtract_outputs
from diffattn.ops.masks import additive_and_visible, band, both

# Rows of queries that share one explicit mask: small enough that a block of the mask
# (rows x keys) stays far below the keys themselves, large enough to keep the kernel busy.
BLOCK_ROWS = 256


def sdpa_diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    *,
    lam: Tensor | float,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Differential attention as two softmax attentions over the same values, [B, T, H, E]."""
    options = {
        "causal": causal,
        "window": window,
        "mask": mask,
        "scale": scale,
        "dropout": dropout,
    }
    signal = sdpa_softmax_attention(q, k, v, **options)
    noise = sdpa_softmax_attention(q_noise, k if k_noise is None else k_noise, v, **options)
    return subtract_outputs(signal, noise, lam)


def sdpa_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Softmax attention by torch's kernel, [B, T, H, E], with bottom-right causal alignment."""
    length, keys = q.shape[1], k.shape[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if factor <= 0:  # torch's causal kernel on a CPU gives NaN there
        q, factor = q * factor, 1.0
    if mask is None and window is None:
        if not causal or (length == 1 and keys > 0):
            return _kernel(q, k, v, None, False, factor, dropout)
        if length == keys:
            return _kernel(q, k, v, None, True, factor, dropout)
    bias, seen = additive_and_visible(mask)
    blocks = []
    for start in range(0, length, BLOCK_ROWS):
        rows = range(start, min(start + BLOCK_ROWS, length))
        columns = _reach(rows, keys, offset=keys - length, causal=causal, window=window)
        part = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        visible = both(
            _block(seen, *part),
            band(
                rows,
                columns,
                offset=keys - length,
                causal=causal,
                window=window,
                device=q.device,
            ),
        )
        blocks.append(
            _masked_kernel(
                q[:, part[0]],
                k[:, part[1]],
                v[:, part[1]],
                _block(bias, *part),
                visible,
                factor,
                dropout,
            )
        )
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _reach(rows: range, keys: int, *, offset: int, causal: bool, window: int | None) -> range:
    """The keys that any of these rows can see; at least one, so that no kernel meets a void."""
    stop = keys
    if causal:
        stop = min(keys, rows.stop + offset)
    elif window is not None:
        stop = min(keys, rows.stop + offset + window - 1)
    stop = max(stop, 1)
    start = 0 if window is None else max(0, rows.start + offset - window + 1)
    return range(min(start, stop - 1), stop)


def _block(mask: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[..., columns] if mask.shape[-1] > 1 else mask
    return mask[..., rows, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask


def _masked_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    if visible is None:
        attn_mask = bias if bias is None else bias.to(q.dtype)
        return _kernel(q, k, v, attn_mask, False, scale, dropout)
    # kernels differ on rows without a visible key (zeros, NaN, NaN gradients):
    # let such a row see everything, then blank it
    empty = ~visible.any(dim=-1, keepdim=True)
    visible = visible | empty
    attn_mask = visible
    if bias is not None:
        if q.dtype.itemsize < 4:
            # softmax ignores a shift of its row: without the largest bias, what decides is near
            # 0, where half precision resolves it best
            bias = bias.float()
            largest = bias.detach().masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
            bias = bias - largest
        attn_mask = bias.to(q.dtype).masked_fill(~visible, float("-inf"))
    out = _kernel(q, k, v, attn_mask, False, scale, dropout)
    blank = empty if empty.dim() == 4 else empty.view((1,) * (4 - empty.dim()) + empty.shape)
    return out.masked_fill(blank.transpose(1, 2), 0.0)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    # torch's memory-linear kernels take one width for queries, keys and values
    value_width = v.shape[-1]
    width = max(q.shape[-1], value_width)
    q, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask.view((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=attn_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)[..., :value_width]
