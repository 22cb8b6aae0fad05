"""What each attention layer does with each implementation: every cell is run and compared.

A cell runs a layer in fp64 against the same layer with impl="reference" (the reference itself
against the softmax or differential attention written out below), or returns the sentence with
which it refuses.
"""

import warnings

import torch

from diffattn.nn import DiffAttention, KeyValueCache, SoftmaxAttention
from diffattn.ops import alibi_bias, document_mask, documents_of_lengths, padding_mask, prefix_mask

WIDTH, LENGTH = 32, 6
IMPLEMENTATIONS = ("reference", "sdpa", "one_call", "blocked", "fused", "auto")

VARIANTS = {
    "softmax": lambda **o: SoftmaxAttention(WIDTH, num_heads=4, num_key_value_heads=2, **o),
    "v1": lambda **o: DiffAttention.v1(
        WIDTH, match_heads=8, match_key_value_heads=4, layer_idx=1, **o
    ),
    "v2": lambda **o: DiffAttention.v2(WIDTH, match_heads=4, match_key_value_heads=2, **o),
    "grouped": lambda **o: DiffAttention.grouped(WIDTH, ratio=2, match_heads=8, layer_idx=1, **o),
    "grouped_latent": lambda **o: DiffAttention.grouped_latent(WIDTH, ratio=2, match_heads=4, **o),
}


def heads_of(layer):
    """Signal heads of a layer."""
    return layer.sizes.num_diff_heads if isinstance(layer, DiffAttention) else 4


def mask_by_head(layer):
    """A bool mask that differs from head to head."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(1, heads_of(layer), LENGTH, LENGTH, generator=generator) > 0.4
    return mask | torch.eye(LENGTH, dtype=torch.bool)


def hidden_row(layer):
    """A mask with one query that sees nothing."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[2] = False
    return mask


# feature: (options of the layer, arguments of the call as a function of layer and input)
FEATURES = {
    "causal": ({}, None),
    "bidirectional": ({"causal": False}, None),
    "cross-attention": ({"causal": False}, lambda layer, x: {"context": x[:, :4]}),
    "keys of another layer": ({"query_only": True}, "key_values"),
    "cache": ({}, "cache"),
    "sliding window": ({"window": 3}, None),
    "padding": ({}, lambda layer, x: {"mask": padding_mask(torch.tensor([4, 6]), LENGTH)}),
    "packed documents": (
        {},
        lambda layer, x: {"mask": document_mask(documents_of_lengths(torch.tensor([0, 2, 6])))},
    ),
    "prefix": (
        {"causal": False},
        lambda layer, x: {"mask": prefix_mask(torch.tensor([2, 4]), LENGTH)},
    ),
    "row without a visible key": ({}, lambda layer, x: {"mask": hidden_row(layer)}),
    "additive bias": ({}, lambda layer, x: {"mask": torch.linspace(-2, 2, 36).view(6, 6)}),
    "mask by head": ({}, lambda layer, x: {"mask": mask_by_head(layer)}),
    "ALiBi": ({}, lambda layer, x: {"mask": alibi_bias(heads_of(layer), LENGTH, LENGTH)}),
    "rotary positions": ({"rope_theta": 100.0}, None),
    "QK-norm": ({"qk_norm": True}, None),
    "output gate": ({"output_gate": True}, None),
    "sink": ({"sink": True}, None),
    "soft cap": ({"softcap": 2.0}, None),
    "biases": ({"bias": True}, None),
    "lam per layer": ({"lam_per": "layer"}, None),
    "lam per head": ({"lam_per": "head"}, None),
    "lam per group": ({"lam_per": "group"}, None),
    "head norm on": ({"head_norm": True}, None),
    "head norm off": ({"head_norm": False}, None),
    "shared dropout": ({"dropout": 0.2, "dropout_masks": "shared"}, "dropout"),
    "independent dropout": ({"dropout": 0.2, "dropout_masks": "independent"}, "dropout"),
    "compile, whole graph": ({}, "compile"),
    "vmap": ({}, "vmap"),
    "bf16": ({}, "bf16"),
}
OF_LAM = ("lam per", "head norm", "shared dropout", "independent dropout")


def cell(variant, feature, impl):
    """ "yes", "-" where the feature has no meaning, or the sentence of the refusal."""
    options, call = FEATURES[feature]
    if variant == "softmax" and impl == "one_call":
        return "-"
    if variant == "softmax" and feature.startswith(OF_LAM):
        if "dropout" not in feature or feature == "shared dropout":
            return "-"
        options = {"dropout": 0.2}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says where vmap is slow
            _run(variant, options, call, impl)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "yes"


def _run(variant, options, call, impl):
    layer = _drawn(VARIANTS[variant](impl=impl, **options))
    reference = _drawn(VARIANTS[variant](impl="reference", **options))
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(
        2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    if call == "dropout":
        return _expect_the_mean(layer, x)
    if call == "bf16":
        got, want = layer.bfloat16()(x.bfloat16()), reference(x)
        assert got.dtype == torch.bfloat16
        return torch.testing.assert_close(got.double(), want, rtol=0.1, atol=0.05)
    if call == "compile":
        torch._dynamo.reset()
        got = torch.compile(layer, fullgraph=True, backend="eager")(x)
    elif call == "vmap":
        got = torch.vmap(layer)(x[:, None])[:, 0]
    elif call == "cache":
        cache = KeyValueCache()
        got = torch.cat([layer(part, cache=cache) for part in x.split((4, 1, 1), dim=1)], dim=1)
    elif call == "key_values":
        source = _drawn(VARIANTS[variant]())
        shared = source.key_values(x)
        got = layer(x[:, 2:], key_values=shared)
        want = reference(x[:, 2:], key_values=shared)
        return torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    else:
        arguments = {} if call is None else call(layer, x)
        got = layer(x, **arguments)
        want = reference(x, **arguments)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        got.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        return None
    return torch.testing.assert_close(got, reference(x), rtol=0, atol=1e-10)


def _drawn(layer):
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer.double()


def _expect_the_mean(layer, x):
    """Dropout leaves the mean of what goes into the output projection where no norm follows."""
    layer.subln = None
    torch.manual_seed(0)
    layer.train()
    total = sum(layer(x) for _ in range(100)) / 100
    want = layer.eval()(x)
    spread = (total - want).abs().max() / want.abs().max()
    assert 0 < spread < 0.5, spread
