"""Every field of the configuration: what it refuses, by name, when it is made and later."""

import math

import pytest
import tiny
import torch

from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM
from diffattn.models.configuration_diff import FIELDS

# not of any field's type
WRONG_TYPES = ("x", ["x"], {"a": 1}, 0.5j)
DERIVED = {"num_attention_heads", "num_key_value_heads", "head_dim"}

COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "match_heads",
    "match_key_value_heads",
    "match_head_dim",
    "noise_ratio",
    "sliding_window",
    "max_position_embeddings",
)
FLAGS = (
    "own_noise_key",
    "head_norm",
    "wide_values",
    "output_gate",
    "qk_norm",
    "attention_sink",
    "attention_bias",
    "attention_output_bias",
    "scale_embeddings",
    "tie_word_embeddings",
    "use_cache",
)
NOT_NEGATIVE = ("rms_norm_eps", "head_norm_eps", "initializer_range", "lambda_std")
POSITIVE = ("rope_theta", "attention_softcap")
OPTIONAL = {
    "intermediate_size",
    "match_key_value_heads",
    "match_head_dim",
    "lam",
    "lam_per",
    "own_noise_key",
    "head_norm",
    "wide_values",
    "output_gate",
    "attention_softcap",
    "attention_output_bias",
    "sliding_window",
    "layer_types",
    "head_norm_eps",
    "initializer_range",
    "lambda_start",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
BAD = {
    **dict.fromkeys(COUNTS, (0, -8, 2.0, "8", True)),
    **dict.fromkeys(FLAGS, ("no", 0, 1, 0.0)),
    **dict.fromkeys(NOT_NEGATIVE, (-1.0, "x", math.nan, math.inf, True)),
    **dict.fromkeys(POSITIVE, (0, -1.0, "x", math.nan, math.inf, True)),
    "attention_dropout": (1.0, -0.1, "x", math.nan, True),
    "lambda_start": (math.nan, math.inf, "x", True),
    "lambda_layer_offset": (0.5, "x", True, None),
    "attention": ("v3", (), 3, ["v1", 3], None),
    "layer_types": ("full_attention", ["full"], [0, 0]),
    "lam": ("tanh", 3),
    "lam_per": ("token", 3),
    "hidden_act": ("gelu", 3),
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


def refusal(name):
    return rf"^{name}: expected [^\n]*, got [^\n]*$"


def test_every_field_is_in_the_table():
    own = set(DiffTransformerConfig.__annotations__)
    annotated = {name for name in own if not name.startswith(("_", "base_model"))}
    assert annotated - DERIVED - {"model_type", "keys_to_ignore_at_inference"} == set(FIELDS)


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_a_value_out_of_range_is_refused_in_one_line(name, value):
    with pytest.raises(ValueError, match=refusal(name)):
        tiny.config("v1", **{name: value})


@pytest.mark.parametrize("name", list(FIELDS))
def test_a_wrong_type_is_refused_in_one_line(name):
    for value in WRONG_TYPES:
        with pytest.raises(ValueError, match=refusal(name)):
            tiny.config("v1", **{name: value})


@pytest.mark.parametrize("name", list(FIELDS))
def test_none_is_refused_where_it_says_nothing(name):
    if name in OPTIONAL:
        tiny.config("v1", **{name: None})
        return
    with pytest.raises(ValueError, match=refusal(name)):
        tiny.config("v1", **{name: None})


@pytest.mark.parametrize(("name", "value"), CASES[::5], ids=str)
def test_a_field_changed_later_is_refused_when_a_model_is_built(name, value):
    config = tiny.config("v1")
    setattr(config, name, value)
    with pytest.raises(ValueError, match=refusal(name)):
        DiffTransformerForCausalLM(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match_head_dim": 5}, "match_head_dim: rotary positions need an even width, got 5"),
        (
            {"hidden_size": 24},
            "match_heads: 8 heads of hidden_size = 24 are 3 wide, but rotary positions need",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["softmax", "v1", "v2"])
def test_an_odd_head_width_is_refused_by_the_field_that_gives_it(options, message, kind):
    with pytest.raises(ValueError, match=f"^{message}"):
        tiny.config(kind, **options)


SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 2.0},
    {"type": "yarn", "factor": 2.0},
    {"type": "dynamic"},
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {"rope_theta": 500.0, "factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
    "x",
]
ROPE_NAMES = ["rope_parameters", "rope_scaling"]


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ROPE_NAMES)
class TestRotaryParameters:
    """Plain rotary positions are taken from transformers' dictionary, all others refused."""

    @pytest.mark.parametrize("parameters", SCALED, ids=str)
    def test_others_are_refused_at_construction_and_when_they_are_set(self, name, parameters):
        with pytest.raises(ValueError, match=r"^rope_\w+: expected .*, got .*$"):
            tiny.config("v1", **{name: parameters})
        config = tiny.config("v1")
        with pytest.raises(ValueError, match=r"^rope_\w+: expected .*, got .*$"):
            setattr(config, name, parameters)

    @pytest.mark.parametrize("kind", ["rope_type", "type"])
    @torch.no_grad()
    def test_their_base_is_used_saved_and_loaded(self, name, kind, tmp_path):
        parameters = {kind: "default", "rope_theta": 50.0}
        given = tiny.config("v1", **{name: dict(parameters)})
        later = tiny.config("v1")
        setattr(later, name, dict(parameters))
        ids, logits = tiny.tokens(1, 10), []
        for index, config in enumerate((given, later, tiny.config("v1", rope_theta=50.0))):
            torch.manual_seed(1)
            model = DiffTransformerForCausalLM(config).eval()
            assert config.rope_theta == 50.0
            model.save_pretrained(tmp_path / str(index))
            loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path / str(index))
            assert torch.equal(loaded(ids).logits, model(ids).logits)
            logits.append(model(ids).logits)
        assert torch.equal(logits[0], logits[2])
        assert torch.equal(logits[1], logits[2])

    def test_the_last_base_that_was_set_counts(self, name, tmp_path):
        config = tiny.config("v1")
        setattr(config, name, {"rope_type": "default", "rope_theta": 50.0})
        config.rope_theta = 70.0
        config.save_pretrained(tmp_path)
        assert DiffTransformerConfig.from_pretrained(tmp_path).rope_theta == 70.0

    def test_a_dictionary_changed_inside_is_refused(self, name):
        config = tiny.config("v1")
        setattr(config, name, {"rope_type": "default", "rope_theta": 50.0})
        getattr(config, name)["rope_theta"] = 70.0
        with pytest.raises(ValueError, match=r"expected the configuration's rope_theta = 50.0"):
            DiffTransformerForCausalLM(config)
        getattr(config, name).update(rope_theta=50.0, rope_type="yarn")
        with pytest.raises(ValueError, match="rope_type: expected 'default', got 'yarn'"):
            DiffTransformerForCausalLM(config)


def test_a_share_of_rotated_channels_is_refused():
    with pytest.raises(ValueError, match=r"got partial_rotary_factor = 0\.5"):
        tiny.config("v1", partial_rotary_factor=0.5)


BUILT_IN = {
    "attention": "v2",
    "hidden_size": 128,
    "intermediate_size": 104,
    "num_hidden_layers": 1,
    "match_heads": 4,
    "match_key_value_heads": 4,
    "match_head_dim": 16,
    "noise_ratio": 1,
    "lam": "sigmoid",
    "lam_per": "head",
    "own_noise_key": False,
    "head_norm": False,
    "wide_values": False,
    "output_gate": True,
    "qk_norm": True,
    "attention_sink": True,
    "attention_softcap": 0.2,
    "attention_bias": True,
    "attention_output_bias": True,
    "hidden_act": "poly_norm",
    "sliding_window": 2,
    "rms_norm_eps": 0.5,
    "head_norm_eps": 0.5,
    "scale_embeddings": False,
    "lambda_start": 0.9,
    "lambda_layer_offset": 2,
}
READ_LATER = {
    "rope_theta": 50.0,
    "attention_dropout": 0.2,
    "lambda_std": 0.2,
    "initializer_range": 0.3,
    "use_cache": False,
    "max_position_embeddings": 99,
}


def test_every_field_that_is_built_in_is_tried():
    assert set(tiny.config("v1").built_in()) == {*BUILT_IN, "layer_types"}


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_a_checkpoint_that_would_compute_something_else_is_not_written(name, tmp_path):
    model = tiny.model("v1")
    setattr(model.config, name, BUILT_IN[name])
    if name in ("sliding_window", "num_hidden_layers"):
        model.config.layer_types = None
    for part in (model, model.model):
        with pytest.raises(ValueError, match=rf"^{name}: expected .* built, got .* new model"):
            part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", list(READ_LATER))
@torch.no_grad()
def test_a_field_that_is_read_later_may_change(name, tmp_path):
    model, ids = tiny.model("v1"), tiny.tokens(1, 10)
    setattr(model.config, name, READ_LATER[name])
    model.save_pretrained(tmp_path)
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    assert getattr(loaded.config, name) == READ_LATER[name]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
def test_a_model_with_more_tokens_is_written(tmp_path):
    model, ids = tiny.model("v1"), tiny.tokens(1, 10)
    model.resize_token_embeddings(tiny.VOCABULARY + 3)
    model.save_pretrained(tmp_path)
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
