"""What passes through the one attention call: cached keys, maps, hidden states."""

import pytest
import tiny
import torch


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
