"""The published attention layers, written from their equations in plain torch.

Nothing here is shared with the package. Tensors are named as in the published state dicts.
"""

import math

import torch


def interleaved(heads, theta=10_000.0):
    """Channels 2i and 2i + 1 of [B, T, heads, D] turn by position * theta^(-2i / D)."""
    width = heads.shape[-1]
    out = heads.clone()
    for t in range(heads.shape[1]):
        for i in range(width // 2):
            c, s = math.cos(t * theta ** (-2 * i / width)), math.sin(t * theta ** (-2 * i / width))
            a, b = heads[:, t, :, 2 * i], heads[:, t, :, 2 * i + 1]
            out[:, t, :, 2 * i], out[:, t, :, 2 * i + 1] = a * c - b * s, a * s + b * c
    return out


def halves(heads, theta=10_000.0):
    """Channels i and i + D/2 turn together."""
    width = heads.shape[-1]
    order = [j for i in range(width // 2) for j in (i, i + width // 2)]
    back = sorted(range(width), key=lambda place: order[place])
    return interleaved(heads[..., order], theta)[..., back]


def softmax_map(q, k, causal):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        length = q.shape[-2]
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    return scores.softmax(-1)


def depth(layer, offset=0):
    return 0.8 - 0.6 * math.exp(-0.3 * (layer + offset))


def normed(head, gain, eps):
    return head / (head.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def pairs(q, k, v, lam, start, gain, *, causal=True, eps=1e-5, ratio=1):
    """V1 or grouped: stripes of `ratio` signals and a noise query, pairs of keys, wide values."""
    groups = k.shape[2] // 2
    stripes = q.shape[2] // (ratio + 1)
    heads = []
    for stripe in range(stripes):
        group = stripe // (stripes // groups)
        noise = softmax_map(q[:, :, stripe * (ratio + 1) + ratio], k[:, :, 2 * group + 1], causal)
        for place in range(ratio):
            signal = softmax_map(q[:, :, stripe * (ratio + 1) + place], k[:, :, 2 * group], causal)
            head = (signal - lam * noise) @ v[:, :, group]
            heads.append((1 - start) * normed(head, gain, eps))
    return torch.cat(heads, -1)


def v1_lambda(w, start, prefix=""):
    first, second = (w[f"{prefix}lambda_q{n}"] @ w[f"{prefix}lambda_k{n}"] for n in "12")
    return first.exp() - second.exp() + start


def unilm_v1(w, x, layer):
    width = w["lambda_q1"].shape[0]
    q, k = (interleaved((x @ w[f"{n}_proj.weight"].T).unflatten(-1, (-1, width))) for n in "qk")
    v = (x @ w["v_proj.weight"].T).unflatten(-1, (-1, 2 * width))
    start = depth(layer)
    gain = w.get("subln.weight", torch.ones(2 * width, dtype=x.dtype))
    return pairs(q, k, v, v1_lambda(w, start), start, gain) @ w["out_proj.weight"].T


def unilm_v2(w, x, layer):
    heads = w["lambda_proj.weight"].shape[0]
    width = w["q_proj.weight"].shape[0] // (2 * heads)
    q, k = (interleaved((x @ w[f"{n}_proj.weight"].T).unflatten(-1, (-1, width))) for n in "qk")
    v = (x @ w["v_proj.weight"].T).unflatten(-1, (-1, width))
    lam = torch.sigmoid(x @ w["lambda_proj.weight"].T)
    share = 2 * heads // k.shape[2]
    outs = [
        softmax_map(q[:, :, h], k[:, :, h // share], True) @ v[:, :, h // share]
        for h in range(2 * heads)
    ]
    joined = [outs[2 * h] - lam[..., h, None] * outs[2 * h + 1] for h in range(heads)]
    return torch.cat(joined, -1) @ w["o_proj.weight"].T


def timm(w, x, layer):
    width = w["sub_norm.weight"].shape[0] // 2
    q, k, v = (x @ w["qkv.weight"].T + w.get("qkv.bias", 0)).chunk(3, -1)
    q, k = (t.unflatten(-1, (-1, width)) for t in (q, k))
    if "q_norm.weight" in w:
        q, k = normed(q, w["q_norm.weight"], 1e-6), normed(k, w["k_norm.weight"], 1e-6)
    start = depth(layer)
    if "lambda_a" in w:
        lam = w["lambda_a"].exp() - w["lambda_b"].exp() + start
    else:
        lam = v1_lambda(w, start)
    v = v.unflatten(-1, (-1, 2 * width))
    joined = pairs(q, k, v, lam, start, w["sub_norm.weight"], causal=False)
    return joined @ w["proj.weight"].T + w.get("proj.bias", 0)


def phi4flash(w, x, layer, keys=None):
    width = w["inner_cross_attn.lambda_q1"].shape[0]
    joined = w["out_proj.weight"].shape[1]
    rest = (w["Wqkv.weight"].shape[0] - joined) // 2
    parts = (x @ w["Wqkv.weight"].T + w["Wqkv.bias"]).split([joined] + [rest] * 2 * bool(rest), -1)
    if keys is None:
        k = parts[1].unflatten(-1, (-1, width))
        v = parts[2].unflatten(-1, (-1, 2 * width))
    else:
        k, v = keys
    q = parts[0].unflatten(-1, (-1, width))
    start = depth(layer)
    lam = v1_lambda(w, start, "inner_cross_attn.")
    out = pairs(q, k, v, lam, start, w["inner_cross_attn.subln.weight"])
    return out @ w["out_proj.weight"].T + w["out_proj.bias"]


def motif(w, x, layer, *, ratio, eps):
    """Attention of Motif-2.6B (ratio 1) and Motif-2-12.7B."""
    width = w["lambda_q1"].shape[0]
    q, k = (halves((x @ w[f"{n}_proj.weight"].T).unflatten(-1, (-1, width))) for n in "qk")
    v = (x @ w["v_proj.weight"].T).unflatten(-1, (-1, 2 * width))
    start = depth(layer, -1)
    out = pairs(q, k, v, v1_lambda(w, start), start, w["subln.weight"], eps=eps, ratio=ratio)
    return out @ w["o_proj.weight"].T


def drawn(shapes, seed=0, dtype=torch.float64):
    """Tensors of these shapes with distinct values; gains near 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm" in name or "subln" in name:
            tensors[name] = (1 + 0.4 * values).to(dtype)
        else:
            tensors[name] = (0.2 * values).to(dtype)
    return tensors
