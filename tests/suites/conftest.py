"""Tiny models in folders, the arms of a comparison, and a text of repeated words."""

import copy
import json
import os

import pytest
import torch

pytest.importorskip("transformers", reason="suites need the extra hf")

from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM

from diffattn.data import train_tokenizer

SPEECH = "the state of our union is strong and we will work for peace and for the people"
WORDS = SPEECH.split()


def passage(seed, words=200):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[n] for n in torch.randint(len(WORDS), (words,), generator=generator))


def save_model(folder, tokenizer, seed=0, context=1024, scale=1.0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def with_bos():
    """A function that lets a tokenizer put its BOS before every text."""

    def made(tokenizer):
        changed, bos = copy.deepcopy(tokenizer), tokenizer.bos_token
        changed.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
        return changed

    return made


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """`text.jsonl`, the models `one`, `other` and `short`, and a comparison `run` of two arms."""
    folder = tmp_path_factory.mktemp("suites")
    texts = [passage(seed) for seed in range(12)]
    tokenizer = train_tokenizer(texts, 290)
    lines = [json.dumps({"text": text}) for text in texts[:6]]
    (folder / "text.jsonl").write_text("\n".join(lines))
    save_model(folder / "one", tokenizer, seed=1)
    save_model(folder / "other", tokenizer, seed=2, scale=200.0)
    save_model(folder / "short", tokenizer, seed=3, context=64)
    for arm in ("first", "second"):
        for seed in range(2):
            run = folder / "run" / "runs" / arm / f"seed{seed}"
            save_model(run / "model", tokenizer, seed=seed + 5 * (arm == "second"))
            (run / "result.json").write_text("{}")
    os.makedirs(folder / "run" / "runs" / "begun" / "seed0")
    return folder
