"""The configuration: what it refuses, and that it survives a file."""

import json

import pytest
import tiny

from diffattn.models import (
    DiffTransformerConfig,
)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"attention": "v3"}, ["attention", "'v1'", "'v3'"]),
        (
            {"attention": ["v1", "linear"], "num_hidden_layers": 2},
            ["attention", "'linear'"],
        ),
        ({"attention": ["v1", "v2"], "num_hidden_layers": 3}, ["attention", "3", "2"]),
        ({"match_heads": 7}, ["match_heads", "7", "64"]),
        ({"match_heads": 1}, ["match_heads", "even", "1"]),
        ({"attention": "softmax", "match_heads": 7}, ["match_heads", "7", "64"]),
        (
            {"attention": "softmax", "match_key_value_heads": 3},
            ["match_key_value_heads", "8", "3"],
        ),
        ({"attention": "v2", "match_heads": 7}, ["match_heads", "7", "64"]),
        ({"attention": "v2", "match_key_value_heads": 3}, ["match_key_value_heads", "3", "8"]),
        ({"match_key_value_heads": 3}, ["match_key_value_heads", "even", "3"]),
        ({"attention": "grouped", "noise_ratio": 3}, ["ratio", "3", "4"]),
        ({"num_attention_heads": 16}, ["num_attention_heads", "8", "16"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads", "4", "8"]),
        ({"head_dim": 8}, ["head_dim", "16", "8"]),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_a_bad_configuration_is_refused_with_its_numbers(options, parts):
    with pytest.raises(ValueError) as caught:
        DiffTransformerConfig(**{"hidden_size": 64, "match_heads": 8, **options})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_that_cannot_be_built_is_refused_with_the_configuration(layer):
    """A mixed model of 7 heads: softmax could have them, V1 cannot, whichever layer it is."""
    kinds = ["softmax"] * 3
    kinds[layer] = "v1"
    with pytest.raises(ValueError, match="even number, got 7"):
        DiffTransformerConfig(hidden_size=56, match_heads=7, attention=kinds, num_hidden_layers=3)


@pytest.mark.parametrize("kind", list(tiny.KINDS))
def test_a_configuration_survives_a_file(kind, tmp_path):
    config = tiny.config(kind, lambda_start=0.5, rope_theta=5000.0, attention_dropout=0.1)
    config.save_pretrained(tmp_path)
    loaded = DiffTransformerConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "diff_transformer"
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        assert written[name] == getattr(config, name)
