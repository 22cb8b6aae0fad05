"""Every choice of the differential layer against the layer written out in plain torch."""

import math

import pytest
import torch

from diffattn.nn import DiffAttention, KeyValueCache, SoftmaxAttention
from diffattn.ops import IMPLEMENTATIONS

WIDTH = 32
CLOSE = {"rtol": 0, "atol": 1e-12}

BUILDERS = {
    "v1": lambda **o: DiffAttention.v1(
        WIDTH, match_heads=8, match_key_value_heads=4, layer_idx=2, **o
    ),
    "v2": lambda **o: DiffAttention.v2(WIDTH, match_heads=4, match_key_value_heads=2, **o),
    "grouped": lambda **o: DiffAttention.grouped(WIDTH, ratio=2, match_heads=8, layer_idx=2, **o),
    "grouped_latent": lambda **o: DiffAttention.grouped_latent(
        WIDTH, ratio=2, match_heads=8, match_key_value_heads=2, value_dim=6, **o
    ),
}
CHOICES = {
    "preset": {},
    "lam per layer": {"lam_per": "layer"},
    "lam per head": {"lam_per": "head"},
    "lam per group": {"lam_per": "group"},
    "gate": {"output_gate": True},
    "no gate": {"output_gate": False},
    "qk norm": {"qk_norm": True},
    "qk norm, rotary": {"qk_norm": True, "rope_theta": 100.0},
    "norm": {"head_norm": True},
    "no norm": {"head_norm": False},
    "sink": {"sink": True},
    "soft cap": {"softcap": 0.7},
    "window": {"window": 2},
    "biases": {"bias": True},
    "output bias": {"output_bias": True},
    "all": {"lam_per": "group", "output_gate": True, "qk_norm": True, "sink": True, "bias": True},
}


def drawn(layer):
    """The layer in fp64 with every parameter drawn, so that none is a neutral start value."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if "lambda_" in name and "proj" not in name else parameter.shape[-1] ** -0.5
            parameter.copy_(1 + 0.3 * values if name.endswith("norm.weight") else scale * values)
    return layer.double()


def rms_norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def rotated(heads, theta):
    """Channel i turns with channel i + D/2."""
    length, width = heads.shape[1], heads.shape[-1]
    for t in range(length):
        out = heads[:, t].clone()
        for i in range(width // 2):
            angle = t * theta ** (-2 * i / width)
            a, b = heads[:, t, :, i], heads[:, t, :, i + width // 2]
            out[..., i] = a * math.cos(angle) - b * math.sin(angle)
            out[..., i + width // 2] = a * math.sin(angle) + b * math.cos(angle)
        heads = torch.cat((heads[:, :t], out[:, None], heads[:, t + 1 :]), dim=1)
    return heads


def lam_of(layer, x, heads, ratio):
    """[B, T, H] by the definition of each kind and granularity."""
    weights = dict(layer.lam.named_parameters())
    if "lambda_proj.weight" in weights:
        lam = torch.sigmoid(x @ weights["lambda_proj.weight"].T)
    else:
        first = (weights["lambda_q1"] * weights["lambda_k1"]).sum(-1)
        second = (weights["lambda_q2"] * weights["lambda_k2"]).sum(-1)
        start = 0.8 - 0.6 * math.exp(-0.3 * layer.layer_idx)
        lam = (first.exp() - second.exp() + start).reshape(-1).expand(*x.shape[:2], -1)
    columns = {1: [0] * heads, heads: range(heads)}.get(lam.shape[-1])
    if columns is None:
        columns = [h // ratio for h in range(heads)]
    return lam[..., list(columns)]


def written_out(layer, x):
    """The whole layer, head by head."""
    sizes, weights = layer.sizes, dict(layer.named_parameters())
    H, ratio, G = sizes.num_diff_heads, sizes.ratio, sizes.num_key_value_heads
    D, E = sizes.head_dim, sizes.value_dim

    def project(name, width):
        out = x @ weights[f"{name}_proj.weight"].T
        if f"{name}_proj.bias" in weights:
            out = out + weights[f"{name}_proj.bias"]
        return out.unflatten(-1, (-1, width))

    q, k, v = project("q", D), project("k", D), project("v", E)
    if layer.q_norm is not None:
        q, k = rms_norm(q, weights["q_norm.weight"]), rms_norm(k, weights["k_norm.weight"])
    if layer.rope_theta is not None:
        q, k = rotated(q, layer.rope_theta), rotated(k, layer.rope_theta)
    lam = lam_of(layer, x, H, ratio)
    length = x.shape[1]
    position = torch.arange(length)
    distance = position[:, None] - position[None, :]
    visible = (distance >= 0) & (distance < (layer.window or length))

    def attend(query_head, key_head):
        scores = q[:, :, query_head] @ k[:, :, key_head].transpose(1, 2) / math.sqrt(D)
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        weight = scores.exp() * visible
        total = weight.sum(-1, keepdim=True)
        if layer.sinks is not None:
            total = total + weights["sinks"][query_head].exp()
        return weight / total

    outputs = []
    for h in range(H):
        stripe, place = divmod(h, ratio)
        group = h // (H // G)
        signal_key, noise_key = (2 * group, 2 * group + 1) if layer.own_noise_key else (group,) * 2
        signal = attend(stripe * (ratio + 1) + place, signal_key)
        noise = attend(stripe * (ratio + 1) + ratio, noise_key)
        head = (signal - lam[:, :, h, None] * noise) @ v[:, :, group]
        if layer.subln is not None:
            start = 0.8 - 0.6 * math.exp(-0.3 * layer.layer_idx)
            head = (1 - start) * rms_norm(head, weights["subln.weight"])
        outputs.append(head)
    joined = torch.cat(outputs, dim=-1)
    if layer.g_proj is not None:
        joined = joined * torch.sigmoid(x @ weights["g_proj.weight"].T)
    out = joined @ weights["o_proj.weight"].T
    return out + weights["o_proj.bias"] if "o_proj.bias" in weights else out


@pytest.mark.parametrize("choice", list(CHOICES))
@pytest.mark.parametrize("preset", list(BUILDERS))
def test_every_choice_equals_the_layer_written_out(preset, choice):
    options = CHOICES[choice]
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with_cap = "softcap" in options
    for impl in ("reference",) if with_cap else IMPLEMENTATIONS:
        layer = drawn(BUILDERS[preset](impl=impl, **options))
        torch.testing.assert_close(layer(x), written_out(layer, x), **CLOSE)


@pytest.mark.parametrize("choice", ["preset", "all", "qk norm, rotary", "lam per head"])
@pytest.mark.parametrize("preset", list(BUILDERS))
def test_a_cached_run_equals_the_full_pass(preset, choice):
    layer = drawn(BUILDERS[preset](**CHOICES[choice]))
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    cache = KeyValueCache()
    parts = [layer(part, cache=cache) for part in x.split((4, 1, 3, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), **CLOSE)


def test_every_parameter_of_every_choice_gets_a_gradient():
    for preset, build in BUILDERS.items():
        for choice, options in CHOICES.items():
            layer = drawn(build(**options))
            layer(torch.randn(2, 5, WIDTH, dtype=torch.float64)).square().sum().backward()
            for name, parameter in layer.named_parameters():
                assert parameter.dim() >= 1
                if name == "k_proj.bias" and layer.k_norm is None and layer.sinks is None:
                    continue  # a shift of a whole row of scores, which softmax does not see
                assert parameter.grad.abs().max() > 1e-9, (preset, choice, name)


LAMBDA_SHAPES = {
    ("grouped", "layer"): [(4,)],
    ("grouped", "head"): [(4, 4)],
    ("grouped", "group"): [(2, 4)],
    ("grouped_latent", "layer"): [(1, WIDTH)],
    ("grouped_latent", "head"): [(8, WIDTH)],
    ("grouped_latent", "group"): [(4, WIDTH)],
}


@pytest.mark.parametrize(("preset", "per"), list(LAMBDA_SHAPES), ids="-".join)
def test_parameters_of_lam_have_a_row_for_what_has_its_own(preset, per):
    layer = BUILDERS[preset](lam_per=per)
    assert {tuple(p.shape) for p in layer.lam.parameters()} == set(LAMBDA_SHAPES[preset, per])
    assert {p.dtype for p in layer.bfloat16().lam.parameters()} == {torch.float32}


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_grouped_latent_of_one_noise_head_a_signal_head_without_gate_is_v2(ratio):
    options = {"match_heads": 8, "match_key_value_heads": 2}
    layer = drawn(DiffAttention.grouped_latent(WIDTH, ratio=ratio, output_gate=False, **options))
    x = torch.randn(1, 6, WIDTH, dtype=torch.float64)
    v2 = DiffAttention.v2(WIDTH, **options).double()
    state = layer.state_dict()
    stripes = state["q_proj.weight"].unflatten(0, (-1, ratio + 1, 4))
    pairs = torch.stack(
        (stripes[:, :ratio], stripes[:, ratio:].expand(-1, ratio, -1, -1)), dim=2
    )  # the noise head repeated beside each of its signal heads
    v2.load_state_dict({**state, "q_proj.weight": pairs.flatten(0, 3)})
    torch.testing.assert_close(layer(x), v2(x), **CLOSE)


@pytest.mark.parametrize("preset", list(BUILDERS))
@pytest.mark.parametrize("theta", [None, 100.0], ids=["no-positions", "rotary"])
def test_query_only_attends_to_the_keys_and_values_of_another_layer(preset, theta):
    """YOCO: with the projections of the source the result is the source's own."""
    source = drawn(BUILDERS[preset](rope_theta=theta))
    layer = BUILDERS[preset](rope_theta=theta, query_only=True).double()
    state = {n: t for n, t in source.state_dict().items() if n[:6] not in ("k_proj", "v_proj")}
    layer.load_state_dict(state)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    shared = source.key_values(x)
    torch.testing.assert_close(layer(x, key_values=shared), source(x), **CLOSE)
    # one more query stands at the last key
    torch.testing.assert_close(layer(x[:, -2:], key_values=shared), source(x)[:, -2:], **CLOSE)
    # and so does a step against the source's cache
    cache = KeyValueCache()
    source(x, cache=cache)
    held = (cache.keys, cache.values)
    torch.testing.assert_close(layer(x[:, -1:], key_values=held), source(x)[:, -1:], **CLOSE)


def test_query_only_softmax_attention():
    source = SoftmaxAttention(WIDTH, num_heads=4, num_key_value_heads=2).double()
    layer = SoftmaxAttention(WIDTH, num_heads=4, num_key_value_heads=2, query_only=True).double()
    layer.load_state_dict({n: t for n, t in source.state_dict().items() if n[0] in "qo"})
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x, key_values=source.key_values(x)), source(x), **CLOSE)


def test_the_softmax_baseline_has_the_same_switches():
    layer = drawn(
        SoftmaxAttention(
            WIDTH, num_heads=4, qk_norm=True, output_gate=True, sink=True, bias=True, softcap=0.8
        )
    )
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    w = dict(layer.named_parameters())
    q, k, v = (
        (x @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"]).unflatten(-1, (4, 8)) for n in "qkv"
    )
    q, k = rms_norm(q, w["q_norm.weight"]), rms_norm(k, w["k_norm.weight"])
    scores = 0.8 * torch.tanh(torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8) / 0.8)
    weight = scores.exp().tril()
    total = weight.sum(-1, keepdim=True) + w["sinks"].exp()[None, :, None, None]
    heads = torch.einsum("bhts,bshd->bthd", weight / total, v).flatten(2)
    want = (heads * torch.sigmoid(x @ w["g_proj.weight"].T)) @ w["o_proj.weight"].T
    torch.testing.assert_close(layer(x), want + w["o_proj.bias"], **CLOSE)


def test_a_refused_call_leaves_the_cache_as_it_was():
    layer, cache = BUILDERS["v1"](), KeyValueCache()
    layer(torch.randn(1, 3, WIDTH), cache=cache)
    with pytest.raises(ValueError, match="mask: expected a shape"):
        layer(torch.randn(1, 2, WIDTH), cache=cache, mask=torch.ones(7, 7, dtype=torch.bool))
    assert len(cache) == 3
    with pytest.raises(ValueError, match=r"cache: holds keys of shape \(1, 3, .*got \(2, 1"):
        layer(torch.randn(2, 1, WIDTH), cache=cache)
    assert len(cache) == 3


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"query_only": True}, {}, "key_values: expected those of another layer"),
        ({}, {"key_values": (1, 2)}, "key_values: this layer has keys of its own"),
        (
            {"query_only": True},
            {"key_values": (1, 2), "cache": KeyValueCache()},
            "cache: expected None in a query_only layer",
        ),
        (
            {"query_only": True, "causal": False},
            {"key_values": (1, 2), "context": torch.randn(1, 2, WIDTH)},
            "context: expected None in a query_only layer",
        ),
    ],
)
def test_sources_of_keys_that_do_not_fit_the_layer(options, call, message):
    layer = BUILDERS["v2"](**options)
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(1, 3, WIDTH), **call)


def test_the_lambda_offset_of_other_checkpoints():
    """Motif counts l - 1, so layer 0 starts at -0.0099; Dragon l + 1."""
    for offset, want in ((-1, -0.009915), (0, 0.2), (1, 0.355509)):
        layer = DiffAttention.v1(WIDTH, match_heads=4, layer_idx=0, lambda_offset=offset)
        assert layer.lam.constants["start"] == pytest.approx(want, abs=1e-6)
        assert layer.subln.factor.item() == pytest.approx(1 - want, abs=1e-6)


def test_constants_are_exact_in_fp64():
    layer = DiffAttention.v1(WIDTH, match_heads=4, layer_idx=1).double()
    want = 0.8 - 0.6 * math.exp(-0.3)
    assert layer.lam.start.item() == want
    assert layer.subln.factor.item() == 1 - want
