"""Training with DEX: groups, checkpoints, resuming, documents kept apart."""

import functools
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="training needs the extra hf")
sys.path.append(str(Path(__file__).parents[1] / "dex"))

import families

from diffattn.data import Windows, write_tokens
from diffattn.data.corpus import Document
from diffattn.data.text_stream import TextStream
from diffattn.dex import DexCallback, DexConfig, inject
from diffattn.dex.adapter import adapter_of
from diffattn.training import TrainConfig, train
from diffattn.training.adaptation import DexTrainer, dex_parameter_groups
from diffattn.training.trainer import Interrupted


class Letters:
    """A tokenizer of single letters."""

    bos_token_id, eos_token_id = 1, 2

    def get_vocab(self):
        return {chr(97 + n): n + 3 for n in range(26)}

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(c) - 94 for c in text if c.isalpha()] for text in texts]}


@pytest.fixture
def tokens(tmp_path):
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice(list("abcdefgh"), 13)) for _ in range(60)]
    documents = [Document(str(n), text) for n, text in enumerate(texts)]
    return write_tokens(documents, Letters(), tmp_path / "tokens.bin", eos=False)


def stream(tokens, steps=6):
    return TextStream(Windows(tokens, 24, seed=0), rows_per_step=2, steps=steps)


def run(tokens, folder, steps=6, stop_at=None, name="llama", **options):
    model = inject(families.build(name), DexConfig(ramp_steps=4))
    config = TrainConfig(
        steps=6, rows_per_step=2, learning_rate=1e-2, seed=0, save_every=100, **options
    )
    done = []
    train(
        model,
        stream(tokens),
        config,
        folder,
        on_progress=lambda step, *_: done.append(step),
        should_stop=None if stop_at is None else lambda: done[-1] == stop_at,
        trainer_class=functools.partial(DexTrainer, lam_rate=10.0),
        callbacks=[DexCallback()],
    )
    return model


def test_resuming_equals_an_uninterrupted_run(tokens, tmp_path):
    whole = run(tokens, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(tokens, tmp_path / "parts", stop_at=3)
    (checkpoint,) = (tmp_path / "parts").glob("checkpoint-3")
    assert (checkpoint / "dex_model.safetensors").exists()
    assert not (checkpoint / "model.safetensors").exists()
    resumed = run(tokens, tmp_path / "parts")
    assert adapter_of(resumed).step == adapter_of(whole).step == 6
    for (name, one), two in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6, msg=name)


def test_lam_moves_and_sees_the_step_of_the_forward_pass(tokens, tmp_path):
    seen = []
    model = inject(families.build("llama"), DexConfig(ramp_steps=4))
    extension = adapter_of(model).parts[0]
    extension.register_forward_hook(lambda m, *_: seen.append(m.shares.tolist()))
    config = TrainConfig(steps=6, rows_per_step=2, learning_rate=1e-2)
    make = functools.partial(DexTrainer, lam_rate=10.0)
    train(model, stream(tokens), config, tmp_path, trainer_class=make, callbacks=[DexCallback()])
    want = [[0.0, 0.0], [0.0375, 0.25], [0.05, 0.5], [0.0375, 0.75], [0.0, 1.0], [0.0, 1.0]]
    np.testing.assert_allclose(seen, want, atol=1e-6)
    assert extension.lambda_learn.abs().item() > 0.01


def test_groups():
    model = inject(families.build("llama"), DexConfig(ramp_steps=4))
    groups = dex_parameter_groups(model, learning_rate=1.0, weight_decay=0.1, lam_rate=5.0)
    rates = {name: (g["lr"], g["weight_decay"]) for g in groups for name in g["names"]}
    assert set(rates) == {n for n, p in model.named_parameters() if p.requires_grad}
    layer = "model.layers.0.self_attn"
    assert rates[f"{layer}.dex.lambda_learn"] == (5.0, 0.0)
    assert rates[f"{layer}.dex.weight"] == (1.0, 0.0)
    assert rates[f"{layer}.o_proj.weight"] == (1.0, 0.1)
    assert f"{layer}.q_proj.weight" not in rates


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_checkpointing_and_autocast_train_the_same_way(name, tokens):
    item = {k: torch.as_tensor(v) for k, v in stream(tokens)[0].items()}
    found = {}
    for kind in ("plain", "checkpointed", "bf16"):
        model = inject(families.build(name), DexConfig(ramp_steps=4)).train()
        for extension in adapter_of(model).parts.values():
            extension.set_step(2)
        if kind == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bf16"):
            loss = model(**item, use_cache=False).loss
        loss.backward()
        found[kind] = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    for name, gradient in found["plain"].items():
        torch.testing.assert_close(found["checkpointed"][name], gradient, rtol=1e-4, atol=1e-6)
        assert found["bf16"][name].dtype == torch.float32
        assert (found["bf16"][name] - gradient).norm() < 0.1 * gradient.norm() + 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2", "diffattn v1-gqa"])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(name, tokens):
    item = {k: torch.as_tensor(v) for k, v in stream(tokens)[0].items()}
    positions = item["position_ids"][0]
    starts = [*positions.eq(0).nonzero().flatten().tolist(), len(positions)]
    assert len(starts) > 2
    model = families.build(name)
    model.set_attn_implementation("sdpa")
    ids = item["input_ids"]
    packed = model(input_ids=ids, position_ids=item["position_ids"], use_cache=False).logits
    for start, stop in itertools.pairwise(starts):
        alone = model(input_ids=ids[:, start:stop], use_cache=False).logits
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=0, atol=1e-5)
        assert item["labels"][0, start] == -100
