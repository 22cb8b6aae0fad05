"""What a model's forward pass refuses: one line that names the argument."""

import pytest
import tiny
import torch
from transformers import DynamicCache, StaticCache

IDS = tiny.tokens(1, 6)
CASES = {
    "no tokens": ({"input_ids": IDS[:, :0]}, "input_ids", "(1, 0)"),
    "no rows": ({"input_ids": IDS[:0]}, "input_ids", "(0, 6)"),
    "one axis": ({"input_ids": IDS[0]}, "input_ids", "(6,)"),
    "no embeddings": (
        {"input_ids": None, "inputs_embeds": torch.zeros(1, 0, 64)},
        "inputs_embeds",
        "(1, 0, 64)",
    ),
    "embeddings of another width": (
        {"input_ids": None, "inputs_embeds": torch.zeros(1, 6, 32)},
        "inputs_embeds",
        "(1, 6, 32)",
    ),
    "nothing": ({"input_ids": None}, "input_ids", "exactly one"),
    "padding too short": ({"attention_mask": torch.ones(1, 4)}, "attention_mask", "(1, 4)"),
    "padding too long": ({"attention_mask": torch.ones(1, 9)}, "attention_mask", "(1, 9)"),
    "padding of other rows": ({"attention_mask": torch.ones(2, 6)}, "attention_mask", "(2, 6)"),
    "mask of other rows": (
        {"attention_mask": torch.ones(2, 1, 6, 6).bool()},
        "attention_mask",
        "(2, 1, 6, 6)",
    ),
    "mask of other queries": (
        {"attention_mask": torch.ones(1, 1, 5, 6).bool()},
        "attention_mask",
        "(1, 1, 5, 6)",
    ),
    "no mask by type": ({"attention_mask": {}}, "attention_mask", "['full_attention']"),
    "a list": ({"attention_mask": [[1] * 6]}, "attention_mask", "list"),
    "positions of one axis": ({"position_ids": torch.arange(6)}, "position_ids", "(6,)"),
    "positions too short": ({"position_ids": torch.arange(4)[None]}, "position_ids", "(1, 4)"),
    "positions of other rows": (
        {"position_ids": torch.arange(6).expand(2, 6)},
        "position_ids",
        "(2, 6)",
    ),
    "lengths too short": ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q", "[0, 3]"),
    "lengths too long": ({"cu_seq_lens_q": torch.tensor([0, 3, 9])}, "cu_seq_lens_q", "9"),
    "no lengths": ({"cu_seq_lens_q": torch.tensor([])}, "cu_seq_lens_q", "[]"),
    "lengths of two axes": ({"cu_seq_lens_q": torch.tensor([[0, 6]])}, "cu_seq_lens_q", "[[0"),
}


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("case", list(CASES))
def test_inputs_that_do_not_fit_are_named(case, attn):
    options, name, part = CASES[case]
    with pytest.raises(ValueError) as caught:
        tiny.model("v1", attn)(**{"input_ids": IDS, **options})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_behind_a_cache_the_mask_covers_what_it_holds(kind):
    model = tiny.model("v1")
    cache = (
        DynamicCache(config=model.config)
        if kind == "dynamic"
        else StaticCache(config=model.config, max_cache_len=8)
    )
    model(IDS[:, :4], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"^attention_mask: expected \[1, .*got shape \(1, 1\)"):
        model(IDS[:, 4:], attention_mask=torch.ones(1, 1), cache=cache, use_cache=True)
    got = model(IDS[:, 4:], attention_mask=torch.ones(1, 6), cache=cache, use_cache=True).logits
    torch.testing.assert_close(got, model(IDS).logits[:, 4:], rtol=0, atol=1e-5)
