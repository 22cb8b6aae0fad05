"""The contract with serving engines: one stock attention call, its geometry in the config."""

import ast
import inspect
import textwrap

import pytest
import tiny
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffattn.models.modeling_diff import ATTENTION_CLASSES, eager_attention


def forward_tree(kind):
    source = inspect.getsource(ATTENTION_CLASSES[kind].forward)
    return ast.parse(textwrap.dedent(source)).body[0]


@pytest.mark.parametrize("kind", list(ATTENTION_CLASSES))
def test_forward_calls_the_attention_interface_exactly_once(kind):
    tree = forward_tree(kind)
    names = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if any(
                isinstance(part, ast.Name) and part.id == "ALL_ATTENTION_FUNCTIONS"
                for part in ast.walk(node.value)
            ):
                names.append(target.id)
    assert names == ["attention_interface"]
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "attention_interface"
    ]
    assert len(calls) == 1
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While, ast.If))]
    assert not any(calls[0] in ast.walk(loop) for loop in loops)


@pytest.mark.parametrize("kind", list(ATTENTION_CLASSES))
def test_the_call_passes_the_module_first_and_a_plain_scaling(kind):
    (call,) = (
        node
        for node in ast.walk(forward_tree(kind))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "attention_interface"
    )
    assert ast.unparse(call.args[0]) == "self"
    (scaling,) = (keyword.value for keyword in call.keywords if keyword.arg == "scaling")
    literal = isinstance(scaling, ast.Constant)
    assert literal or ast.unparse(scaling) == "self.scaling"
    assert any(keyword.arg is None for keyword in call.keywords)  # **kwargs reach the kernel


@pytest.fixture
def probe():
    """A registered attention function that notes its arguments; yields the notes."""
    notes = []

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        notes.append(
            {
                "query": query.shape,
                "key": key.shape,
                "value": value.shape,
                "scaling": scaling,
                "groups": module.num_key_value_groups,
                "is_causal": module.is_causal,
                "layer_idx": module.layer_idx,
                "kwargs": set(kwargs),
            }
        )
        out, _ = eager_attention(module, query, key, value, attention_mask, scaling, dropout)
        return out, None

    AttentionInterface.register("probe", attention)
    AttentionMaskInterface.register("probe", eager_mask)
    yield notes
    AttentionInterface._global_mapping.pop("probe")
    AttentionMaskInterface._global_mapping.pop("probe")
    assert "probe" not in ALL_ATTENTION_FUNCTIONS.valid_keys()


@pytest.mark.parametrize("kind", [k for k in tiny.KINDS if not k.startswith("mixed")])
@torch.no_grad()
def test_a_registered_kernel_sees_the_geometry_of_the_configuration(kind, probe):
    ids = tiny.tokens(2, 7)
    model = tiny.model(kind, "probe")
    logits = model(ids).logits
    config = model.config
    assert [note["layer_idx"] for note in probe] == list(range(config.num_hidden_layers))
    for note in probe:
        assert note["query"] == (2, config.num_attention_heads, 7, config.head_dim)
        assert note["key"] == (2, config.num_key_value_heads, 7, config.head_dim)
        assert note["value"][:3] == (2, config.num_key_value_heads, 7)
        assert note["groups"] == config.num_attention_heads // config.num_key_value_heads
        assert note["scaling"] == (config.hidden_size // config.match_heads) ** -0.5
        assert note["is_causal"] is True
        assert "position_ids" in note["kwargs"]
    torch.testing.assert_close(logits, tiny.model(kind, "sdpa")(ids).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_each_layer_of_a_mixed_model_makes_one_call(probe):
    model = tiny.model("mixed", "probe")
    model(tiny.tokens(1, 5))
    assert [note["layer_idx"] for note in probe] == [0, 1, 2, 3]
    for layer, note in enumerate(probe):
        heads, groups, width = model.config.kernel_geometry(layer)
        assert note["query"] == (1, heads, 5, width)
        assert note["key"] == (1, groups, 5, width)


@torch.no_grad()
def test_a_cached_step_hands_the_kernel_every_key(probe):
    model = tiny.model("v1", "probe")
    model.generate(tiny.tokens(1, 4), max_new_tokens=3, do_sample=False, pad_token_id=0)
    keys = [note["key"][2] for note in probe if note["layer_idx"] == 0]
    queries = [note["query"][2] for note in probe if note["layer_idx"] == 0]
    assert keys == [4, 5, 6]
    assert queries == [4, 1, 1]


@torch.no_grad()
def test_further_arguments_reach_the_kernel(probe):
    tiny.model("v1", "probe")(tiny.tokens(1, 4), an_engines_argument=1)
    assert all("an_engines_argument" in note["kwargs"] for note in probe)


@pytest.mark.parametrize("kind", tiny.DIFFERENTIAL)
@torch.no_grad()
def test_output_attentions_are_difference_maps_whose_rows_sum_to_one_minus_lam(kind):
    model, ids = tiny.model(kind, "eager"), tiny.tokens(2, 7)
    lams = [torch.tensor(0.0) for _ in model.model.layers]

    def note(index):
        return lambda module, args, out: lams.__setitem__(index, out)

    for index, layer in enumerate(model.model.layers):
        if model.config.attention_kind(index) != "softmax":
            layer.self_attn.lam.register_forward_hook(note(index))
    maps = model(ids, output_attentions=True).attentions
    assert len(maps) == model.config.num_hidden_layers
    for index, (weights, lam) in enumerate(zip(maps, lams, strict=True)):
        kind_of_layer = model.config.attention_kind(index)
        heads = 8 if kind_of_layer in ("v2", "softmax") else 4
        assert weights.shape == (2, heads, 7, 7)
        want = 1 - (lam.transpose(1, 2) if lam.dim() else lam)
        torch.testing.assert_close(weights.sum(-1), want.expand(2, heads, 7), rtol=0, atol=1e-5)
        assert (weights.triu(1) == 0).all()
        assert (weights < 0).any() == (kind_of_layer != "softmax")


@torch.no_grad()
def test_hidden_states_are_returned_for_every_layer():
    model, ids = tiny.model("v1", "eager"), tiny.tokens(2, 7)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(out.hidden_states[0], embedded)
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits)
