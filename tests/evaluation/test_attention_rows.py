"""Rows behind a cached context are those of the whole maps, and their shares add up."""

import pytest
import torch

pytest.importorskip("transformers", reason="rows are read through transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from diffattn.evaluation.attention_rows import last_rows
from diffattn.evaluation.continuations import ReadContext
from diffattn.evaluation.shares import absolute_entropy, attention_parts, negative_mass, row_shares
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(kind):
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    config = DiffTransformerConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, match_heads=4, attention=kind
    )
    return DiffTransformerForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["llama", "softmax", "v1", "v2"])
def test_rows_are_those_of_the_whole_maps(kind):
    model, ids = tiny(kind), torch.randint(60, (40,), generator=torch.Generator().manual_seed(1))
    before = model.config._attn_implementation
    context = ReadContext(model, ids[:33].tolist())
    found = last_rows(context, ids[33:].tolist())
    assert model.config._attn_implementation == before
    again = last_rows(context, ids[33:].tolist())  # the context is left as it was
    model.set_attn_implementation("eager")
    maps = model(input_ids=ids[None], output_attentions=True).attentions
    for rows, twice, layer in zip(found, again, maps, strict=True):
        torch.testing.assert_close(rows.used, layer[0, :, -1], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(rows.used, twice.used)
        torch.testing.assert_close(rows.signal.sum(-1), torch.ones(len(rows.signal)))
        assert (rows.noise is None) == (kind in ("llama", "softmax"))
        if rows.noise is not None:  # used = signal - lam noise, so lam is one number for a row
            shared = rows.noise.repeat_interleave(len(rows.signal) // len(rows.noise), dim=0)
            lam = (rows.signal - rows.used) / shared
            torch.testing.assert_close(lam, lam[:, :1].expand_as(lam), atol=1e-3, rtol=1e-3)


def test_parts_cover_every_key_once():
    parts = attention_parts(10, [(3, 5)], 8)
    assert torch.stack(list(parts.values())).sum(0).tolist() == [1] * 10
    assert parts["answer"].nonzero().flatten().tolist() == [3, 4]


def test_rules_on_a_signed_row():
    row = torch.tensor([[0.25, 0.5, -0.25, 0.25]])
    parts = attention_parts(4, [(1, 2)], 3)
    shares = {rule: row_shares(row, parts, rule) for rule in ("raw", "rowsum", "abs")}
    assert [shares["raw"][key] for key in ("answer", "noise", "first")] == [0.5, -0.25, 0.25]
    assert shares["rowsum"]["answer"] == pytest.approx(0.5 / 0.75)
    assert shares["abs"]["answer"] == pytest.approx(0.4)
    assert sum(shares["abs"].values()) == pytest.approx(1)
    assert negative_mass(row) == pytest.approx(0.2)
    assert absolute_entropy(torch.full((1, 8), -0.125)) == pytest.approx(2.0794, abs=1e-4)
