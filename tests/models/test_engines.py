"""Models that an engine would serve with wrong numbers are refused when it builds them."""

import pytest
import tiny
from transformers import AttentionInterface

from diffattn.models import DiffTransformerModel
from diffattn.models.eager import eager_attention
from diffattn.models.engines import ENGINES

REFUSED = {
    "other layers": (
        {"attention": ["v1", "v2"]},
        r"serves layers of one geometry, .* \(8, 4, 16\) in layer 0 and \(16, 8, 8\) in layer 1",
    ),
    "wide values on shared keys": (
        {"attention": "v2", "wide_values": True},
        "wide_values: .* in layer 0 they are 16 wide and keys 8",
    ),
    "norms inside the feed-forward": (
        {"attention": "v1", "hidden_act": "poly_norm"},
        "hidden_act: expected 'silu', got 'poly_norm'",
    ),
}
SERVED = {
    "v1": {"attention": "v1"},
    "v2": {"attention": "v2"},
    "softmax": {"attention": "softmax"},
    "v1 with and without a noise head of its own": {
        "attention": ["v1", "grouped"],
        "noise_ratio": 1,
    },
}


@pytest.fixture(params=ENGINES)
def engine(request):
    """The name of an engine, registered as engines do."""
    AttentionInterface.register(request.param, eager_attention)
    yield request.param
    AttentionInterface._global_mapping.pop(request.param)


def build(engine, options):
    return DiffTransformerModel._from_config(tiny.config(**options), attn_implementation=engine)


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_an_engine_would_serve_wrongly_is_refused(case, engine):
    options, sentence = REFUSED[case]
    with pytest.raises(NotImplementedError, match=sentence) as caught:
        build(engine, options)
    assert engine in str(caught.value)
    build("eager", options)  # which transformers runs


@pytest.mark.parametrize("case", list(SERVED))
def test_layers_of_one_geometry_are_built(case, engine):
    assert build(engine, SERVED[case]).config._attn_implementation == engine
