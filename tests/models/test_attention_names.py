"""Causality under every registered name of an attention implementation."""

import pytest
import tiny
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.integrations import flex_attention as flex
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffattn.models.eager import eager_attention
from diffattn.models.engines import ENGINES

CLOSE = {"rtol": 0, "atol": 1e-5}
HERE = ["eager", "sdpa", tiny.FUSED]
NAMES = sorted({"eager", *ALL_ATTENTION_FUNCTIONS})
FLASH = [name for name in NAMES if name.startswith("flash_attention")]
# of continuous batching alone: test_decoding.py
PAGED = [name for name in NAMES if name.startswith("paged|")]


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """transformers compiles each call of flex attention, for half a minute."""
    masking = pytest.importorskip("transformers.masking_utils")
    made = masking.create_block_mask
    monkeypatch.setattr(
        masking, "create_block_mask", lambda **options: made(**{**options, "_compile": False})
    )
    monkeypatch.setattr(flex.WrappedFlexAttention, "__call__", lambda self: flex.flex_attention)


def changed_later(ids):
    """Row t differs from the given one in token t + 1."""
    length = ids.shape[1]
    rows = ids.repeat(length - 1, 1)
    later = torch.arange(length - 1)
    rows[later, later + 1] = (ids[0, 1:] + 7) % tiny.VOCABULARY
    return rows


def check_causality(base, changed):
    """Logits of row t equal those of the unchanged text up to t, and not behind."""
    for t, row in enumerate(changed):
        torch.testing.assert_close(row[: t + 1], base[: t + 1], **CLOSE)
        assert (row[t + 1] - base[t + 1]).abs().max() > 1e-3


def test_every_registered_name_is_known_to_these_tests():
    assert set(NAMES) == {*HERE, "flex_attention", *FLASH, *PAGED}


@pytest.mark.parametrize("name", FLASH)
def test_flash_attention_is_refused_where_it_is_not_installed(name):
    if torch.cuda.is_available():
        pytest.skip(reason="may be installed")
    with pytest.raises((ImportError, ValueError), match=r"(?i)flash"):
        tiny.model("v1", name)(tiny.tokens(1, 4))


@pytest.mark.parametrize(("kind", "attn"), tiny.CASES)
@torch.no_grad()
def test_a_later_token_never_changes_earlier_logits(kind, attn):
    model, ids = tiny.model(kind, attn), tiny.tokens(1, 10)
    check_causality(model(ids).logits[0], model(changed_later(ids)).logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("kind", "attn"), tiny.CASES)
@torch.no_grad()
def test_nor_within_a_chunk_behind_a_cache(kind, attn, cache):
    """As in assisted decoding, which reads several proposed tokens at once."""
    model, ids = tiny.model(kind, attn), tiny.tokens(1, 10)

    def logits(rows):
        if cache == "static":
            held = StaticCache(config=model.config, max_cache_len=12)
        else:
            held = DynamicCache(config=model.config)
        past = ids[:, :4].repeat(len(rows), 1)
        return tiny.cached_logits(model, torch.cat((past, rows), 1), (4, 6), held)[:, 4:]

    check_causality(logits(ids[:, 4:])[0], logits(changed_later(ids[:, 4:])))


@pytest.mark.parametrize(("kind", "attn"), tiny.CASES)
def test_nor_its_gradient_in_training(kind, attn):
    model, ids = tiny.model(kind, attn).train(), tiny.tokens(1, 10)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds).logits[0, 4].square().sum().backward()
    assert embeds.grad[0, :5].abs().amax(-1).min() > 0
    assert (embeds.grad[0, 5:] == 0).all()


@torch.no_grad()
def test_flex_attention_on_a_cpu(uncompiled_flex):
    """Causality, padding and rows that see nothing, in a forward pass."""
    model, ids = tiny.model("v1", "flex_attention"), tiny.tokens(1, 10)
    eager = tiny.model("v1", "eager")
    base = model(ids).logits
    torch.testing.assert_close(base, eager(ids).logits, **CLOSE)
    check_causality(base[0], model(changed_later(ids)).logits)
    outputs = []
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: outputs.append(output[0])
    )
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]])
    visible = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()
    visible[..., :2, :] = False
    lowest = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    for mask in (padding, visible, lowest):
        got, want = (m(ids, attention_mask=mask).logits for m in (model, eager))
        torch.testing.assert_close(got, want, **CLOSE)
        assert (outputs.pop()[:, :2] == 0).all()


def test_flex_attention_has_no_backward_on_a_cpu(uncompiled_flex):
    model, ids = tiny.model("v1", "flex_attention"), tiny.tokens(1, 10)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        model(ids, labels=ids).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v1", "v2"])
@torch.no_grad()
def test_flex_attention_compiled_equals_eager(kind):
    model = tiny.model(kind, "flex_attention").requires_grad_(False)
    ids = tiny.tokens(2, 20)
    want = tiny.model(kind, "eager")(ids).logits
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=1e-4)


@pytest.fixture
def without_mask_function():
    AttentionInterface.register("maskless", eager_attention)
    yield "maskless"
    AttentionInterface._global_mapping.pop("maskless")


class TestNamesWithoutAMaskFunction:
    """transformers hands them no mask, so they would read the future and padding."""

    REFUSAL = "has no mask function, so it would get no causal order, window or padding"

    def test_they_do_not_train(self, without_mask_function):
        model, ids = tiny.model("v1", without_mask_function).train(), tiny.tokens(2, 6)
        with pytest.raises(ValueError, match=self.REFUSAL):
            model(ids, labels=ids)

    @pytest.mark.parametrize("mask", [None, "ones", "none by type"])
    @torch.no_grad()
    def test_nor_do_they_run_without_gradients(self, without_mask_function, mask):
        model, ids = tiny.model("v1", without_mask_function), tiny.tokens(2, 6)
        mask = {"ones": torch.ones_like(ids), "none by type": {"full_attention": None}}.get(mask)
        with pytest.raises(ValueError, match=self.REFUSAL):
            model(ids, attention_mask=mask)

    @pytest.mark.parametrize("engine", ENGINES)
    @torch.no_grad()
    def test_engines_keep_their_own_causal_order(self, engine):
        """They register a name alone, and hand no mask over on purpose."""
        notes = []

        def attention(module, query, key, value, attention_mask, **kwargs):
            notes.append(attention_mask)
            return query.transpose(1, 2), None

        AttentionInterface.register(engine, attention)
        try:
            model, ids = tiny.model("v1", engine), tiny.tokens(1, 6)
            model.model(ids, use_cache=False, position_ids=torch.arange(6)[None])
            with torch.enable_grad(), pytest.raises(ValueError, match=self.REFUSAL):
                model.train()(ids)
        finally:
            AttentionInterface._global_mapping.pop(engine)
        assert notes == [None] * model.config.num_hidden_layers

    @torch.no_grad()
    def test_a_prepared_mask_needs_no_function(self, without_mask_function):
        model, ids = tiny.model("v1", without_mask_function), tiny.tokens(1, 6)
        causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
        want = tiny.model("v1", "eager")(ids).logits
        torch.testing.assert_close(model(ids, attention_mask=causal).logits, want, **CLOSE)

    def test_they_read_no_padding(self, without_mask_function):
        model, ids = tiny.model("v1", without_mask_function), tiny.tokens(2, 6)
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match=self.REFUSAL):
            model(ids, attention_mask=mask)

    def test_with_a_mask_function_they_do_both(self, without_mask_function):
        AttentionMaskInterface.register(
            without_mask_function, AttentionMaskInterface._global_mapping["eager"]
        )
        try:
            model, ids = tiny.model("v1", without_mask_function).train(), tiny.tokens(2, 6)
            mask = torch.ones_like(ids)
            mask[0, 0] = 0
            out = model(ids, attention_mask=mask, labels=ids)
        finally:
            AttentionMaskInterface._global_mapping.pop(without_mask_function)
        want = tiny.model("v1", "eager")(ids, attention_mask=mask, labels=ids)
        torch.testing.assert_close(out.loss, want.loss, **CLOSE)

    def test_the_eager_name_of_continuous_batching_runs_nowhere_else(self):
        with pytest.raises(ValueError, match=f"'paged|eager' {self.REFUSAL}"):
            tiny.model("v1", "paged|eager")(tiny.tokens(2, 6))
