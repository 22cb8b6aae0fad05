"""Differential attention written a second time, from the papers, in loops over plain numbers.

Nothing here is shared with the package: tensors are turned into nested lists of Python floats
(IEEE double precision) and every sum is a loop. Slow, and meant to be read against the equations:

- Ye et al., "Differential Transformer", arXiv 2410.05258:
  Eq. 1   DiffAttn(X) = (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V
  Eq. 2   lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init
  sec 2.1 lambda_init = 0.8 - 0.6 exp(-0.3 (l - 1)) for layer l = 1, 2, ...
  Eq. 3   MultiHead = Concat((1 - lambda_init) LN(head_i)) W^O, LN = RMSNorm of each head
- Differential Transformer V2 (January 2026): both maps read the signal's key, lambda for each
  token and head, no norm.
- Grouped differential attention, arXiv 2510.06949: r signal maps minus one noise map.
- Su et al., arXiv 2104.09864, Eq. 34: rotation of channel pairs, here channel i with i + d/2.
"""

import math

import torch


def visible(query, key, queries, keys, *, causal=False, window=None):
    """Whether a query may see a key; the last query stands at the last key."""
    position = query + keys - queries
    if causal and key > position:
        return False
    return not (window is not None and abs(position - key) >= window)


def softmax_row(scores, sink=None):
    """Softmax of one query's scores, None marking a hidden key; no key at all gives zeros.

    A sink takes part in the sum and has no entry of its own.
    """
    sink = None if sink is None else float(sink)
    seen = [score for score in scores if score is not None]
    if not seen:
        return [0.0] * len(scores)
    largest = max(seen if sink is None else [*seen, sink])
    weights = [0.0 if score is None else math.exp(score - largest) for score in scores]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - largest))
    return [weight / total for weight in weights]


def difference_map(
    q,
    k,
    q_noise,
    k_noise=None,
    *,
    lam,
    causal=False,
    window=None,
    mask=None,
    bias=None,
    scale=None,
    softcap=None,
    sink=None,
    sink_noise=None,
):
    """A1 - lambda A2 of Eq. 1 for every head, [B, H, T, S] in fp64.

    Args:
        q: [B, T, H, D]; k: [B, S, G, D]; q_noise: [B, T, N, D]; k_noise: [B, S, G, D] or None.
        lam: float, [H] or [B, T, H].
        mask: bool [B, H, T, S], True = visible, or None.
        bias: [B, H, T, S] added to the scores after the cap, or None.
        softcap: c of c tanh(score / c), or None.
        sink: [H] and sink_noise: [N] logits, or None.
    """

    def capped(score):
        return score if softcap is None else softcap * math.tanh(score / softcap)

    batches, queries, heads, width = q.shape
    keys, groups = k.shape[1], k.shape[2]
    share = heads // q_noise.shape[2]
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    q1, k1, q2 = q.double().tolist(), k.double().tolist(), q_noise.double().tolist()
    k2 = k1 if k_noise is None else k_noise.double().tolist()
    seen = None if mask is None else mask.tolist()
    result = torch.zeros(batches, heads, queries, keys, dtype=torch.float64)
    for b in range(batches):
        for h in range(heads):
            group, noise_head = h // (heads // groups), h // share
            for t in range(queries):
                signal, noise = [], []
                for s in range(keys):
                    hidden = not visible(t, s, queries, keys, causal=causal, window=window)
                    if hidden or (seen is not None and not seen[b][h][t][s]):
                        signal.append(None)
                        noise.append(None)
                        continue
                    added = 0.0 if bias is None else float(bias[b, h, t, s])
                    signal.append(capped(scale * dot(q1[b][t][h], k1[b][s][group])) + added)
                    noise.append(capped(scale * dot(q2[b][t][noise_head], k2[b][s][group])) + added)
                a1 = softmax_row(signal, None if sink is None else float(sink[h]))
                a2 = softmax_row(
                    noise, None if sink_noise is None else float(sink_noise[noise_head])
                )
                coefficient = lam_of(lam, b, t, h)
                row = [x - coefficient * y for x, y in zip(a1, a2, strict=True)]
                result[b, h, t] = torch.tensor(row, dtype=torch.float64)
    return result


def diff_attention(q, k, v, q_noise, k_noise=None, **options):
    """Eq. 1 for every head: the difference map times the values, [B, T, H, E] in fp64."""
    weights = difference_map(q, k, q_noise, k_noise, **options).tolist()
    values = v.double().tolist()
    batches, queries, heads = q.shape[:3]
    keys, groups, width = v.shape[1:]
    result = torch.zeros(batches, queries, heads, width, dtype=torch.float64)
    for b in range(batches):
        for h in range(heads):
            group = h // (heads // groups)
            for t in range(queries):
                head = [0.0] * width
                for s in range(keys):
                    weight = weights[b][h][t][s]
                    if weight:
                        value = values[b][s][group]
                        head = [x + weight * y for x, y in zip(head, value, strict=True)]
                result[b, t, h] = torch.tensor(head, dtype=torch.float64)
    return result


def lam_of(lam, b, t, h):
    """The coefficient of one query and head from a number, [H] or [B, T, H]."""
    if not isinstance(lam, torch.Tensor) or lam.dim() == 0:
        return float(lam)
    return float(lam[h]) if lam.dim() == 1 else float(lam[b, t, h])


def dot(a, b):
    """Scalar product of two lists."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += x * y
    return total


def rms_norm(row, gain, eps):
    """RMSNorm of one head's output."""
    mean_square = sum(x * x for x in row) / len(row)
    return [x / math.sqrt(mean_square + eps) * g for x, g in zip(row, gain, strict=True)]


def depth_constant(layer_number):
    """lambda_init of layer l = 1, 2, ... as the paper counts."""
    return 0.8 - 0.6 * math.exp(-0.3 * (layer_number - 1))


def exponential(lambda_q1, lambda_k1, lambda_q2, lambda_k2, start):
    """Eq. 2."""
    first = dot(lambda_q1.double().tolist(), lambda_k1.double().tolist())
    second = dot(lambda_q2.double().tolist(), lambda_k2.double().tolist())
    return math.exp(first) - math.exp(second) + start


def rotate(head, position, theta):
    """Rotate channel i with channel i + d/2 by position * theta^(-2 i / d)."""
    half = len(head) // 2
    out = list(head)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(head))
        a, b = head[i], head[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


def project(x, weight):
    """Rows of [B, T, M] times W^T, as nested lists [B][T][out]."""
    rows, columns = x.double().tolist(), weight.double().tolist()
    return [[[dot(row, column) for column in columns] for row in batch] for batch in rows]


def heads_of(projected, count, width):
    """Cut the last axis into heads: [B, T, count, width]."""
    return torch.tensor(
        [
            [[row[i * width : (i + 1) * width] for i in range(count)] for row in batch]
            for batch in projected
        ],
        dtype=torch.float64,
    )


def v1_layer(
    x,
    *,
    wq,
    wk,
    wv,
    wo,
    lam,
    lambda_init,
    gain,
    pairs,
    groups,
    head_dim,
    eps=1e-5,
    ratio=1,
    theta=None,
    causal=True,
):
    """The whole V1 layer (ratio 1) or grouped layer, Eqs. 1 to 3, [B, T, M] in fp64.

    Query heads stand in stripes of `ratio` signal heads and their noise head, key heads in pairs
    (k, k') for each of the `groups`; values are twice as wide as queries.
    """
    stripes = pairs // ratio
    queries = heads_of(project(x, wq), pairs + stripes, head_dim)
    keys = heads_of(project(x, wk), 2 * groups, head_dim)
    values = heads_of(project(x, wv), groups, 2 * head_dim)
    if theta is not None:
        for tensor in (queries, keys):
            for b in range(tensor.shape[0]):
                for t in range(tensor.shape[1]):
                    for h in range(tensor.shape[2]):
                        rotated = rotate(tensor[b, t, h].tolist(), t, theta)
                        tensor[b, t, h] = torch.tensor(rotated, dtype=torch.float64)
    signal_heads = [
        stripe * (ratio + 1) + place for stripe in range(stripes) for place in range(ratio)
    ]
    noise_heads = [stripe * (ratio + 1) + ratio for stripe in range(stripes)]
    heads = diff_attention(
        queries[:, :, signal_heads],
        keys[:, :, [2 * g for g in range(groups)]],
        values,
        queries[:, :, noise_heads],
        keys[:, :, [2 * g + 1 for g in range(groups)]],
        lam=lam,
        causal=causal,
    )
    joined = torch.zeros(*x.shape[:2], pairs * 2 * head_dim, dtype=torch.float64)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            concatenated = []
            for h in range(pairs):
                normed = rms_norm(heads[b, t, h].tolist(), gain.double().tolist(), eps)
                concatenated += [(1.0 - lambda_init) * value for value in normed]
            joined[b, t] = torch.tensor(concatenated, dtype=torch.float64)
    return torch.tensor(project(joined, wo), dtype=torch.float64)
