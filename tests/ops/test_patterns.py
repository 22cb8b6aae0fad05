"""Mask builders: each pattern equals the calls that it stands for."""

import pytest
import torch

from diffattn.ops import (
    IMPLEMENTATIONS,
    alibi_bias,
    diff_attention,
    document_mask,
    documents_of_lengths,
    documents_of_positions,
    padding_mask,
    prefix_mask,
)

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def operands(batch=2, length=8, heads=4, noise_heads=4, groups=2):
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads, 4), (groups, 4), (groups, 8), (noise_heads, 4), (groups, 4)]
    return [
        torch.randn(batch, length, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
def test_padded_rows_equal_solo_runs(impl, side, causal):
    tensors = operands()
    lengths = torch.tensor([3, 6])
    mask = padding_mask(lengths, 8, side=side)
    out = diff_attention(*tensors, lam=0.3, causal=causal, mask=mask, impl=impl)
    for row, length in enumerate(lengths.tolist()):
        part = slice(8 - length, 8) if side == "left" else slice(0, length)
        solo = [t[row : row + 1, part] for t in tensors]
        want = diff_attention(*solo, lam=0.3, causal=causal, impl=impl)
        torch.testing.assert_close(out[row : row + 1, part], want, **CLOSE)
    if causal and side == "left":  # padding before the first token sees nothing
        assert (out[0, :5] == 0).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_packed_documents_equal_separate_calls(impl):
    tensors = operands(batch=1)
    documents = documents_of_lengths(torch.tensor([0, 3, 8]))
    out = diff_attention(*tensors, lam=0.3, causal=True, mask=document_mask(documents), impl=impl)
    for part in (slice(0, 3), slice(3, 8)):
        want = diff_attention(*(t[:, part] for t in tensors), lam=0.3, causal=True, impl=impl)
        torch.testing.assert_close(out[:, part], want, **CLOSE)


def test_lengths_and_positions_tell_the_same_documents():
    lengths = documents_of_lengths(torch.tensor([0, 3, 3, 8]))
    positions = documents_of_positions(
        torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [5, 6, 0, 0, 1, 2, 3, 9]])
    )
    assert torch.equal(document_mask(lengths), document_mask(positions[:1]))
    assert positions[1].tolist() == [0, 0, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_prefix_is_seen_from_everywhere_and_what_follows_from_behind(impl):
    tensors = operands()
    mask = prefix_mask(torch.tensor([0, 5]), 8)
    out = diff_attention(*tensors, lam=0.3, mask=mask, impl=impl)
    causal = diff_attention(*tensors, lam=0.3, causal=True, impl=impl)
    torch.testing.assert_close(out[0], causal[0], **CLOSE)
    alone = diff_attention(*(t[1:, :5] for t in tensors), lam=0.3, impl=impl)
    torch.testing.assert_close(out[1:, :5], alone, **CLOSE)
    torch.testing.assert_close(out[1, 5:], causal[1, 5:], **CLOSE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_alibi_equals_scores_written_out(impl):
    q, k, v, q_noise, k_noise = operands()
    out = diff_attention(
        q[:, 2:], k, v, q_noise[:, 2:], k_noise, lam=0.3, causal=True,
        mask=alibi_bias(4, 6, 8), impl=impl,
    )  # fmt: skip
    maps = []
    for queries, keys in ((q, k), (q_noise, k_noise)):
        keys = keys.repeat_interleave(2, dim=2)
        scores = torch.einsum("bthd,bshd->bhts", queries[:, 2:], keys) / 2
        for h in range(4):
            for t in range(6):
                for s in range(8):
                    scores[:, h, t, s] -= 2.0 ** (-2 * (h + 1)) * abs(t + 2 - s)
                    if s > t + 2:
                        scores[:, h, t, s] = float("-inf")
        maps.append(scores.softmax(-1))
    want = torch.einsum("bhts,bshe->bthe", maps[0] - 0.3 * maps[1], v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-7)  # the bias is fp32


def test_alibi_slopes_of_a_number_of_heads_that_is_no_power_of_two():
    slopes = -alibi_bias(6, 1, 2)[0, :, 0, 0]
    want = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert slopes.tolist() == pytest.approx(want)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="side: expected 'left' or 'right', got 'top'"):
        padding_mask(torch.tensor([1]), 2, side="top")
    with pytest.raises(ValueError, match=r"cu_seqlens: expected lengths summed up .* \[1, 3\]"):
        documents_of_lengths(torch.tensor([1, 3]))
