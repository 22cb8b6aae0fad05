"""The ten rules of serving engines that adapt a Hugging Face class, one test for each."""

import ast
import copy
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from diffattn.models import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerModel,
)
from diffattn.models.modeling_diff import ATTENTION_CLASSES
from diffattn.ops import rotary_angles

LATENT = {"kind": "grouped", "attention": "grouped_latent"}
ONE_GEOMETRY = [kind for kind in tiny.KINDS if not kind.startswith("mixed")]
EVERY_PARAMETER = {
    "softmax": {"kind": "softmax"},
    "v1": {"kind": "v1"},
    "v1-per-head": {"kind": "v1", "lam_per": "head"},
    "v2": {"kind": "v2"},
    "v2-per-layer": {"kind": "v2", "lam_per": "layer"},
    "grouped": {"kind": "grouped"},
    "grouped-latent": LATENT,
    "options": {
        "kind": "v1",
        "attn": "eager",
        "qk_norm": True,
        "output_gate": True,
        "attention_sink": True,
        "attention_bias": True,
        "attention_output_bias": False,
    },
}

# a sigmoid lam per layer is expanded to the heads of all ranks
SPLIT_BETWEEN_RANKS = [
    *(case for case in EVERY_PARAMETER if case != "v2-per-layer"),
    "v1-gqa",
    "v2-gqa",
]


def interface_calls(forward):
    """Calls of the attention interface in a source, found as vLLM's Transformers backend does.

    Local names that are assigned `ALL_ATTENTION_FUNCTIONS[...]` or one of its methods' results,
    directly, and then the calls of those names.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            source = node.value.func if isinstance(node.value, ast.Call) else node.value
            if (
                isinstance(source, (ast.Attribute, ast.Subscript))
                and isinstance(source.value, ast.Name)
                and source.value.id == "ALL_ATTENTION_FUNCTIONS"
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def attribute_of_self(call, name):
    """Attribute of `self` that a call passes under a keyword."""
    (value,) = (keyword.value for keyword in call.keywords if keyword.arg == name)
    assert isinstance(value, ast.Attribute)
    assert ast.unparse(value.value) == "self"
    return value.attr


@torch.no_grad()
def test_rule_1_the_base_model_carries_everything_but_the_head(probe):
    """Arguments of an engine go through the base model; it is called without cache and names."""
    assert DiffTransformerForCausalLM.is_backend_compatible()
    model, ids = tiny.model("v1", "probe"), tiny.tokens(1, 4)
    assert [name for name, _ in model.named_children()] == ["model", "lm_head"]
    outputs = model.model(
        input_ids=ids,
        position_ids=torch.arange(4)[None],
        use_cache=False,
        return_dict=False,
        an_engines_argument=1,
    )
    assert len(outputs) == 1
    assert len(probe) == model.config.num_hidden_layers
    assert all({"an_engines_argument", "position_ids"} <= note["kwargs"] for note in probe)
    torch.testing.assert_close(model.lm_head(outputs[0]), model(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", list(ATTENTION_CLASSES))
def test_rule_2_the_source_of_forward_calls_the_interface_once(kind):
    (call,) = interface_calls(ATTENTION_CLASSES[kind].forward)
    assert ast.unparse(call.args[0]) == "self"
    assert any(keyword.arg is None for keyword in call.keywords)  # **kwargs reach the kernel
    assert len(interface_calls(DiffLlamaAttention.forward)) == 2  # which vLLM refuses


@pytest.mark.parametrize("kind", list(tiny.KINDS))
def test_rule_3_scaling_and_layer_index_are_read_off_the_module(kind):
    model = tiny.model(kind)
    indices = []
    for layer in model.model.layers:
        attention = layer.self_attn
        (call,) = interface_calls(type(attention).forward)
        scaling = getattr(attention, attribute_of_self(call, "scaling"))
        assert isinstance(scaling, float)
        assert scaling == (model.config.hidden_size // model.config.match_heads) ** -0.5
        assert getattr(attention, attribute_of_self(call, "s_aux")) is None
        assert attention.config is model.config
        assert type(attention.layer_idx) is int
        indices.append(attention.layer_idx)
    assert indices == list(range(model.config.num_hidden_layers))


@pytest.mark.parametrize("options", [{"kind": k} for k in ONE_GEOMETRY] + [LATENT], ids=str)
@torch.no_grad()
def test_rule_4_the_configuration_carries_the_geometry_of_the_kernel(options, probe):
    ids = tiny.tokens(2, 7)
    model = tiny.model(**options, attn="probe")
    logits = model(ids).logits
    config = model.config
    assert [note["layer_idx"] for note in probe] == list(range(config.num_hidden_layers))
    for note in probe:
        assert note["query"] == (2, config.num_attention_heads, 7, config.head_dim)
        assert note["key"] == (2, config.num_key_value_heads, 7, config.head_dim)
        assert note["value"] == note["key"]
        assert note["groups"] == config.num_attention_heads // config.num_key_value_heads
        assert note["scaling"] == (config.hidden_size // config.match_heads) ** -0.5
        assert note["is_causal"] is True
    torch.testing.assert_close(
        logits, tiny.model(**options, attn="sdpa")(ids).logits, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("case", list(EVERY_PARAMETER))
def test_rule_5_plans_cover_every_parameter_of_attention(case):
    """Heads are split by columns on the way in, by rows on the way out; the rest has a style."""
    base = tiny.model(**EVERY_PARAMETER[case]).model
    plan = base.config.base_model_tp_plan
    styles = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "lambda_proj"), "colwise")
    styles["o_proj"] = "rowwise"
    if case == "v2-per-layer":  # one column cannot be split
        styles.pop("lambda_proj")
    for name, _ in base.named_parameters():
        if ".self_attn." not in name:
            continue
        parts = re.sub(r"\.\d+\.", ".*.", name).split(".")
        # the parameter itself or a module that holds it, within self_attn
        planned = [plan.get(".".join(parts[:end])) for end in range(4, len(parts) + 1)]
        assert any(planned), f"{name} is in no plan"
        for projection in styles.keys() & set(parts):
            assert styles[projection] in planned, name
    assert set(base.config.base_model_pp_plan) == {name for name, _ in base.named_children()}


def test_rule_6_auto_classes_find_every_class_without_remote_code(tmp_path):
    """The base model too, which engines build alone."""
    model, ids = tiny.model("v1"), tiny.tokens()
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(config) is DiffTransformerConfig
    assert config.architectures == ["DiffTransformerForCausalLM"]
    assert type(AutoModel.from_config(config)) is DiffTransformerModel
    assert type(AutoModelForCausalLM.from_config(config)) is DiffTransformerForCausalLM
    causal = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    base = AutoModel.from_pretrained(tmp_path, trust_remote_code=False)
    with torch.no_grad():
        torch.testing.assert_close(causal(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            base(ids).last_hidden_state, model.model(ids).last_hidden_state, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("kind", ["v1", "v2"])
@torch.no_grad()
def test_rule_7_logits_to_keep_takes_positions(kind):
    """In any order, as continuous batching asks for the last token of each request."""
    model, ids = tiny.model(kind), tiny.tokens(2, 12)
    positions = torch.tensor([5, 0, 11])
    kept = model(ids, logits_to_keep=positions).logits
    torch.testing.assert_close(kept, model(ids).logits[:, positions], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["v1", "grouped", "mixed"])
def test_rule_8_buffers_that_are_in_no_file_are_rebuilt_after_the_meta_device(kind):
    wanted = dict(tiny.model(kind, lambda_start=0.7).named_buffers())
    with torch.device("meta"):
        model = DiffTransformerForCausalLM(tiny.config(kind, lambda_start=0.7))
    model.to_empty(device="cpu")
    buffers = dict(model.named_buffers())
    assert {name.rsplit(".", 1)[1] for name in buffers} == {"start", "factor"}
    assert not set(buffers) & set(model.state_dict())
    for buffer in buffers.values():
        buffer.fill_(torch.nan)
    model.apply(model._init_weights)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, wanted[name]), name


def half_of_the_heads(layer, rank):
    """A copy of an attention layer with what tensor parallelism gives to one of two ranks."""
    part = copy.deepcopy(layer)
    for name, parameter in part.named_parameters():
        split = {"q_proj", "k_proj", "v_proj", "g_proj", "lambda_proj", "sinks"} & {
            *name.split(".")
        }
        if split or ("lam.lambda_" in name and parameter.dim() == 2):
            parameter.data = parameter.data.chunk(2)[rank]
        elif "o_proj" in name:
            parameter.data = parameter.data.chunk(2, dim=1)[rank]
    return part


@pytest.mark.parametrize("case", SPLIT_BETWEEN_RANKS)
@torch.no_grad()
def test_rule_9_a_layer_runs_with_half_of_the_heads(case):
    """No reshape counts on the configuration: two halves add up to the whole layer."""
    options = {"attn": "eager", **EVERY_PARAMETER.get(case, {"kind": case})}
    model = tiny.model(**options)
    layer = model.model.layers[1].self_attn
    x = torch.randn(2, 6, model.config.hidden_size)
    angles = rotary_angles(torch.arange(6)[None], layer.head_dim, theta=1e4, dtype=torch.float32)
    mask = torch.full((6, 6), -torch.inf).triu(1)[None, None]
    whole, _ = layer(x, position_embeddings=angles, attention_mask=mask)
    halves = [
        half_of_the_heads(layer, rank)(x, position_embeddings=angles, attention_mask=mask)[0]
        for rank in (0, 1)
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=0, atol=1e-5)
    assert (halves[0] - whole).abs().max() > 0.01


@pytest.mark.parametrize(
    "cls",
    [
        DiffTransformerConfig,
        DiffTransformerModel,
        DiffTransformerForCausalLM,
        *dict.fromkeys(ATTENTION_CLASSES.values()),
    ],
)
def test_rule_10_classes_have_a_source_file_that_can_be_imported(cls):
    file = Path(inspect.getsourcefile(cls))
    assert file.suffix == ".py"
    module = importlib.import_module(cls.__module__)
    assert Path(module.__file__) == file
    assert getattr(module, cls.__name__) is cls
    assert "<locals>" not in cls.__qualname__
