"""Plans of tensor parallelism, the degrees they allow, and parameters fit for sharding."""

import re

import pytest
import torch
from tiny import KINDS, config, model
from transformers import AutoConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from diffattn.models import DiffTransformerForCausalLM

VARIANTS = {
    **{kind: {"kind": kind} for kind in KINDS},
    "grouped_latent": {"kind": "v2", "attention": "grouped_latent"},
    "lam_per_head": {"kind": "v1", "lam_per": "head"},
    "lam_per_group": {"kind": "grouped", "lam_per": "group"},
    "sigmoid_per_group": {"kind": "grouped", "lam": "sigmoid", "lam_per": "group"},
    "exponential_v2": {"kind": "v2", "lam": "exponential"},
    "everything": {
        "kind": "v1",
        "qk_norm": True,
        "attention_sink": True,
        "output_gate": True,
        "attention_bias": True,
        "hidden_act": "poly_norm",
        "attn": "eager",
    },
}
# whole in every process, each of which computes the same from it
REPLICATED = ("norm.weight", "layernorm.weight", "act_fn.weight", "act_fn.bias")


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_parameter_has_zero_dimensions(variant):
    for name, parameter in model(**VARIANTS[variant]).named_parameters():
        assert parameter.dim() > 0, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant):
    built = model(**VARIANTS[variant])
    ids = torch.arange(1, 9)[None]
    built(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_plan_names_what_there_is(variant):
    built = model(**VARIANTS[variant])
    modules = {re.sub(r"\.\d+", ".*", name) for name, _ in built.named_modules()}
    parameters = {re.sub(r"\.\d+", ".*", name) for name, _ in built.named_parameters()}
    plan = built.tp_plan
    assert set(plan) <= modules | parameters
    assert set(plan.values()) <= set(ALL_PARALLEL_STYLES)
    planned = set(plan) | {name.rpartition(".")[0] for name in parameters if name in plan}
    for name in parameters - set(plan):
        owner = name.rpartition(".")[0]
        whole = name.endswith(REPLICATED) and "self_attn" not in name
        assert owner in planned or whole, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_rule_that_a_linear_map_begins_with_is_its_own(variant):
    # vLLM reads a plan so
    built = model(**VARIANTS[variant])
    for name, module in built.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            first = next(rule for rule in built.tp_plan if re.match(rule, name))
            assert re.sub(r"\.\d+", ".*", name) == first


def test_the_plan_stands_in_no_checkpoint(tmp_path):
    config("v1").save_pretrained(tmp_path)
    assert "plan" not in (tmp_path / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path).base_model_tp_plan == (
        config("v1").base_model_tp_plan
    )


def split(settings, degree):
    """What from_pretrained does with an empty model before it reads weights."""
    with torch.device("meta"):
        built = DiffTransformerForCausalLM(settings)
    sizes = DistributedConfig(tp_size=degree)
    return DiffTransformerForCausalLM.maybe_distribute_model(built, sizes, None)


@pytest.mark.parametrize(
    ("kind", "options", "fits", "refused", "numbers"),
    [
        ("softmax-gqa", {}, 4, 8, "the 4 key/value heads of layer 0 (softmax)"),
        ("v1", {"match_key_value_heads": 4}, 2, 4, "the 2 key/value heads of layer 0 (v1)"),
        ("v1", {}, 4, 8, "the 4 key/value heads of layer 0 (v1)"),
        ("v2-gqa", {}, 4, 8, "the 4 key/value heads of layer 0 (v2)"),
        ("v2", {"match_key_value_heads": 1}, 1, 2, "the 1 key/value heads of layer 0 (v2)"),
        ("grouped", {}, 2, 4, "the 2 key/value heads of layer 0 (grouped)"),
        ("mixed", {}, 2, 4, "the 2 key/value heads of layer 3 (grouped)"),
        ("v1", {"hidden_size": 96, "match_heads": 12}, 3, 4, "the 6 key/value heads of layer 0"),
    ],
)
def test_a_degree_that_parts_a_pair_from_its_keys_is_refused(kind, options, fits, refused, numbers):
    split(config(kind, **options), fits)
    with pytest.raises(ValueError, match=re.escape(f"tp_size: {refused} does not divide")) as error:
        split(config(kind, **options), refused)
    assert numbers in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["v1", "v2", "grouped"])
def test_one_sigmoid_for_all_heads_is_refused(kind):
    settings = config(kind, lam="sigmoid", lam_per="layer")
    split(settings, 1)
    with pytest.raises(ValueError, match=r"lam_per='layer' is one value for all") as error:
        split(settings, 2)
    assert "\n" not in str(error.value)
