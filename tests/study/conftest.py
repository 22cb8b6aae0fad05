"""A tiny base model in a folder, with a text that it can learn."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="DEX needs the extra hf")
sys.path.append(str(Path(__file__).parents[1] / "dex"))

import families

from diffattn.data import train_tokenizer

SPEECH = "the state of our union is strong and we will work for peace and for the people"
WORDS = SPEECH.split()


def text(count):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        places = torch.randint(len(WORDS), (40,), generator=generator)
        yield " ".join(WORDS[place] for place in places.tolist())


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with a tiny model in bf16 and its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("base")
    texts = list(text(120))
    tokenizer = train_tokenizer(texts, 270)
    model = families.build("llama", vocab_size=300, max_position_embeddings=4000).bfloat16()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"text": entry}) for entry in texts]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder
