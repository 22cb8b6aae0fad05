"""The subtraction itself, in fp32 whatever the inputs are."""

import torch
from torch import Tensor


def subtract_outputs(signal: Tensor, noise: Tensor, lam: Tensor | float) -> Tensor:
    """Signal minus lam times noise, for attention outputs.

        out = signal - lam * noise

    Args:
        signal: [B, T, H, E] outputs of the signal maps.
        noise: [B, T, N, E] outputs of the noise maps; N divides H, and noise head n serves the
            signal heads n H/N to (n + 1) H/N - 1.
        lam: a number, [H] or [B, T, H].

    Returns:
        [B, T, H, E] in the dtype of `signal`; the difference is taken in fp32 or better.

    Source: Ye et al., arXiv 2410.05258, Eq. 1; r:1 sharing after arXiv 2510.06949.
    """
    work = torch.promote_types(signal.dtype, torch.float32)
    ratio = signal.shape[2] // noise.shape[2]
    signal_grouped = signal.unflatten(2, (-1, ratio)).to(work)  # [B, T, N, r, E]
    lam = _lam_tensor(lam, signal)
    if lam.dim():
        lam = lam.unflatten(-1, (-1, ratio)).unsqueeze(-1)  # [(B, T,) N, r, 1]
    out = signal_grouped - lam * noise.unsqueeze(3).to(work)
    return out.flatten(2, 3).to(signal.dtype)


def subtract_maps(signal: Tensor, noise: Tensor, lam: Tensor | float) -> Tensor:
    """Signal minus lam times noise, for attention maps.

        A = A1 - lam * A2

    Args:
        signal: [B, H, T, S] signal maps.
        noise: [B, N, T, S] noise maps; N divides H.
        lam: a number, [H] or [B, T, H].

    Returns:
        [B, H, T, S] in the dtype of `signal`; each row sums to 1 - lam, entries may be negative.

    Source: Ye et al., arXiv 2410.05258, Eq. 1.
    """
    return subtract_outputs(signal.transpose(1, 2), noise.transpose(1, 2), lam).transpose(1, 2)


def _lam_tensor(lam: Tensor | float, like: Tensor) -> Tensor:
    work = torch.promote_types(like.dtype, torch.float32)
    return torch.as_tensor(lam, dtype=work, device=like.device)
