"""Measures on models whose answers are known."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="models need the extra hf")

from diffattn.data import (
    Document,
    RecallTokens,
    Windows,
    distractor,
    oracle,
    recall_grid,
    train_tokenizer,
    write_tokens,
)
from diffattn.evaluation import (
    attention_shares,
    lam_by_layer,
    recall_outcomes,
    take_turns,
    training_rates,
    window_losses,
)
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM

TEXT = " ".join(f"The member of seat {i} voted on bill {i * 7 % 97}." for i in range(800))


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    tokenizer = train_tokenizer([TEXT], 300)
    tokens = write_tokens(
        [Document("text", TEXT)], tokenizer, tmp_path_factory.mktemp("data") / "text.bin"
    )
    recall = RecallTokens(300, classes=8, values=8)
    items = recall_grid(
        recall,
        tokens,
        lengths=(48, 80),
        cells=((1, 1), (4, 2)),
        depths=(0.0, 0.5, 1.0),
        samples=2,
        seed=3,
        bos_id=tokens.bos_id,
    )
    return tokens, recall, items


def model_of(kind, vocab=400, layers=2):
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(
        DiffTransformerConfig(
            vocab_size=vocab,
            hidden_size=32,
            num_hidden_layers=layers,
            match_heads=4,
            attention=kind,
        )
    )


class Answering:
    """Stands for a model: answers each question as `rule` says."""

    training, device = False, torch.device("cpu")

    def __init__(self, items, rule, vocab=400):
        self.rule, self.vocab = rule, vocab
        self.items = {tuple(item.sequence.input_ids): item for item in items}

    def eval(self):
        pass

    def train(self, mode):
        pass

    def __call__(self, input_ids, logits_to_keep, use_cache):
        logits = torch.zeros(*input_ids.shape, self.vocab)
        for row, ids in enumerate(input_ids):
            item = self.items[tuple(ids.tolist())]
            for position, answer in zip(
                item.sequence.query_positions, self.rule(item), strict=True
            ):
                logits[row, position, answer] = 1.0
        return type("Output", (), {"logits": logits[:, logits_to_keep]})


def test_an_oracle_recalls_all_and_a_distractor_nothing(grid):
    _, _, items = grid
    right = recall_outcomes(Answering(items, oracle), items, tokens_per_batch=100)
    assert [outcome.accuracy for outcome in right] == [1.0] * len(items)
    assert [outcome.swap for outcome in right] == [0.0] * len(items)
    wrong = recall_outcomes(Answering(items, distractor), items, tokens_per_batch=1000)
    assert [outcome.accuracy for outcome in wrong] == [0.0] * len(items)
    swaps = [outcome.swap for outcome in wrong]
    assert swaps == [1.0 if item.needles > 1 else 0.0 for item in items]


def test_half_of_the_questions_right_is_half(grid):
    _, _, items = grid
    pairs = [item for item in items if item.queries == 2]

    def first_only(item):
        return [oracle(item)[0], distractor(item)[1]]

    outcomes = recall_outcomes(Answering(pairs, first_only), pairs, tokens_per_batch=100)
    assert {outcome.accuracy for outcome in outcomes} == {0.5}


def test_recall_agrees_with_the_whole_forward_pass(grid):
    _, _, items = grid
    model = model_of("v1")
    outcomes = recall_outcomes(model, items, tokens_per_batch=200)
    for item, outcome in zip(items, outcomes, strict=True):
        logits = model(torch.as_tensor(item.sequence.input_ids)[None]).logits[0]
        predicted = logits.argmax(-1).numpy()[item.sequence.query_positions]
        assert outcome.accuracy == np.mean(predicted == item.sequence.answers)


@pytest.mark.parametrize("kind", ["softmax", "v1", "v2", "grouped"])
def test_shares_are_those_of_the_maps(grid, kind):
    _, _, items = grid
    model = model_of(kind)
    shares = attention_shares(model, items, tokens_per_batch=200)
    model.set_attn_implementation("eager")
    for item, share in zip(items, shares, strict=True):
        question = item.sequence.query_positions[0]
        ids = torch.as_tensor(item.sequence.input_ids)[None, : question + 1]
        with torch.no_grad():
            maps = model(ids, output_attentions=True).attentions
        rows = torch.stack([layer[0, :, -1].abs() for layer in maps])
        rows = (rows / rows.sum(-1, keepdim=True)).mean((0, 1))
        answer = float(rows[item.sequence.needle_positions[0]])
        assert share.answer == pytest.approx(answer, abs=1e-6)
        assert share.first == pytest.approx(float(rows[0]), abs=1e-6)
        assert share.answer + share.noise + share.first + float(rows[-1]) == pytest.approx(1.0)


def test_attention_leaves_the_model_as_it_was(grid):
    _, _, items = grid
    model = model_of("v1").train()
    before = model.config._attn_implementation
    attention_shares(model, items[:2], tokens_per_batch=200)
    assert model.training
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_window_losses_are_the_models_own(grid, batch_size):
    tokens, _, _ = grid
    windows = [window for window, _ in zip(Windows(tokens, 32, seed=0), range(5), strict=False)]
    model = model_of("v2")
    losses = window_losses(model, windows, batch_size=batch_size)
    for window, loss in zip(windows, losses, strict=True):
        ids = torch.as_tensor(window)[None]
        assert loss == pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-5)


def test_lam_of_each_layer():
    model = model_of(["softmax", "v1", "v2"], layers=3)
    ids = torch.randint(0, 400, (2, 16))
    torch.nn.init.zeros_(model.model.layers[2].self_attn.lam.lambda_proj.weight)
    lams = lam_by_layer(model, ids)
    assert lams[0] is None
    layer = model.model.layers[1].self_attn
    assert lams[1] == pytest.approx(layer.lam(ids).item(), abs=1e-6)
    assert lams[2] == 0.5
    assert lam_by_layer(model_of("softmax"), ids) == []


def test_rates_are_measured_in_turn():
    models = [model_of("softmax"), model_of("v1")]
    rates = training_rates(models, torch.randint(0, 400, (2, 16)), rounds=3)
    assert rates.shape == (2, 3)
    assert (rates > 0).all()


def test_turns_start_with_another_side_each_and_short_ones_are_repeated():
    order = []
    sides = [lambda name=name: order.append(name) for name in "abc"]
    seconds = take_turns(sides, rounds=2)
    assert seconds.shape == (3, 2)
    assert "".join(order) == "cab" + "abc" + "bca"
    order.clear()
    seconds = take_turns(sides[:1], rounds=1, shortest=0.01)
    assert len(order) > 2
    assert (seconds < 0.01).all()
    assert take_turns(sides, rounds=1, seconds=0.02).shape[1] > 1
