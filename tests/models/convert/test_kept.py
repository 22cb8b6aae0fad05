"""What a target would not say again is refused."""

import pytest
from folders import SIZES, convert, ours

from diffattn.errors import UserError
from diffattn.models import DiffTransformerConfig
from diffattn.models.convert.kept import NOT_COMPARED, refuse_lost

TARGETS = {
    "motif": {"attention": "v1", "scale_embeddings": False, "lambda_layer_offset": -1},
    "motif2": {"attention": "grouped", "scale_embeddings": False, "lambda_layer_offset": -1},
    "diffllama": {"attention": "v1"},
    "unilm-v1": {"attention": "v1"},
    "unilm-v2": {"attention": "v2"},
}
CHOICES = {
    "output_gate": True,
    "lam": {"v1": "sigmoid", "v2": "exponential"},
    "lam_per": {"v1": "head", "v2": "layer"},
    "own_noise_key": {"v1": False, "v2": True},
    "head_norm": {"v1": False, "v2": True},
    "wide_values": {"v1": False, "v2": True},
    "qk_norm": True,
    "attention_sink": True,
    "attention_softcap": 2.0,
    "attention_bias": True,
    "attention_output_bias": True,
    "attention_dropout": 0.1,
    "sliding_window": 3,
}

CARRIED = {("motif", "attention_dropout"), ("motif2", "attention_dropout")}


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_model_as_published_is_converted_and_read_again(target, tmp_path):
    source = ours(tmp_path / "ours", **TARGETS[target])
    assert convert(source, tmp_path / "there", "--to", target)[0] == 0
    assert convert(tmp_path / "there", tmp_path / "back")[0] == 0


@pytest.mark.parametrize(
    ("target", "name"),
    [(target, name) for target in TARGETS for name in CHOICES if (target, name) not in CARRIED],
)
def test_a_choice_that_the_target_does_not_have_is_refused(target, name, tmp_path):
    choice = CHOICES[name]
    if isinstance(choice, dict):
        choice = choice["v2" if target == "unilm-v2" else "v1"]
    source = ours(tmp_path / "ours", **TARGETS[target] | {name: choice})
    code, said = convert(source, tmp_path / "there", "--to", target)
    assert code == 2
    assert f"convert: {name}: " in said
    assert f"got {choice!r}" in said
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        ("unilm-v1", "head_norm_eps", 0.1),
        ("unilm-v1", "rms_norm_eps", 0.1),
        ("unilm-v1", "rope_theta", 500.0),
        ("unilm-v2", "rope_theta", 500.0),
        ("unilm-v1", "lambda_start", 0.5),
        ("unilm-v1", "lambda_layer_offset", -1),
        ("diffllama", "head_norm_eps", 0.1),
        ("diffllama", "hidden_act", "poly_norm"),
        ("motif", "scale_embeddings", True),
    ],
)
def test_a_setting_that_the_target_cannot_say_is_refused(target, name, value, tmp_path):
    source = ours(tmp_path / "ours", **TARGETS[target] | {name: value})
    code, said = convert(source, tmp_path / "there", "--to", target)
    name = "head_norm_eps" if name == "rms_norm_eps" else name
    assert (code, f"convert: {name}: " in said) == (2, True), said


def test_motifs_epsilon_of_zero_is_kept(tmp_path):
    source = ours(tmp_path / "ours", **TARGETS["motif"] | {"head_norm_eps": 0.0})
    assert convert(source, tmp_path / "there", "--to", "motif")[0] == 0
    assert convert(tmp_path / "there", tmp_path / "back")[0] == 0
    assert DiffTransformerConfig.from_pretrained(tmp_path / "back").head_norm_eps == 0


def test_one_motif_is_not_the_other(tmp_path):
    source = ours(tmp_path / "ours", **TARGETS["motif2"])
    code, said = convert(source, tmp_path / "there", "--to", "motif")
    assert (code, "to: this model is motif2, got motif" in said) == (2, True)


def test_a_layer_that_differs_is_named(tmp_path):
    source = ours(tmp_path / "ours", attention=["v1", "v2"])
    said = convert(source, tmp_path / "there", "--to", "unilm-v1")[1]
    assert "lam: unilm-v1 has 'exponential', got 'sigmoid' in layer 1" in said


OTHERS = {
    "vocab_size": 33,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "attention": "softmax",
    "match_heads": 8,
    "match_key_value_heads": 2,
    "match_head_dim": 16,
    **{name: each["v1"] if isinstance(each, dict) else each for name, each in CHOICES.items()},
    "hidden_act": "poly_norm",
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.1,
    "head_norm_eps": 0.1,
    "scale_embeddings": False,
    "lambda_start": 0.5,
    "lambda_layer_offset": -1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_every_field_is_compared(name):
    config = DiffTransformerConfig(**SIZES)
    with pytest.raises(UserError, match=": there has"):
        refuse_lost("there", DiffTransformerConfig(**SIZES | {name: OTHERS[name]}), config)
    refuse_lost("there", config, DiffTransformerConfig(**SIZES))


def test_a_field_that_is_added_is_compared():
    assert set(DiffTransformerConfig.__annotations__) == {*OTHERS, *NOT_COMPARED}
