"""Answers in texts, asked of models whose probabilities are known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="models need the extra hf")

from diffattn.data import AnswerItem, encode_answers, starts_with_bos, train_tokenizer
from diffattn.errors import UserError
from diffattn.evaluation import answer_outcomes


class Fixed(torch.nn.Module):
    """At every position the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.device, self.asked = torch.tensor(logits), torch.device("cpu"), []

    def forward(self, input_ids, use_cache, logits_to_keep):
        self.asked.append(logits_to_keep.tolist())
        shape = (1, len(logits_to_keep), len(self.logits))
        return SimpleNamespace(logits=self.logits.expand(shape))


def test_loss_and_accuracy_of_an_answer_of_two_tokens():
    model = Fixed([0.0, math.log(2.0), math.log(5.0)])
    items = [AnswerItem(np.array([0, 1, 2, 2, 1, 0]), ((2, 4), (4, 5)))]
    (outcome,) = answer_outcomes(model, items)
    assert outcome.accuracy == 0.5  # 2, 2 is most likely; 1 is not
    two, one = 2 * math.log(8 / 5), math.log(8 / 2)
    assert outcome.loss == pytest.approx((two + one) / 2)
    assert model.asked == [[1, 2, 3, 4, 5]]  # from before the first answer on


def test_choices_narrow_what_counts():
    model = Fixed([0.0, math.log(2.0), math.log(5.0)])
    items = [AnswerItem(np.array([0, 1]), ((1, 2),), (0, 1))]
    (outcome,) = answer_outcomes(model, items)
    assert outcome.accuracy == 1.0
    assert outcome.loss == pytest.approx(math.log(3 / 2))


def test_the_model_keeps_its_mode():
    model = Fixed([0.0, 1.0]).train()
    answer_outcomes(model, [AnswerItem(np.array([0, 1]), ((1, 2),))])
    assert model.training


def test_spans_cover_every_token_of_an_answer():
    tokenizer = train_tokenizer(["the number is twelve " * 5, "the number is one " * 5], 270)
    text = "the number is 4711."
    item = encode_answers(text, [(14, 18)], tokenizer)
    start, stop = item.spans[0]
    assert tokenizer.decode(item.input_ids[start:stop]).strip() == "4711"
    assert not starts_with_bos(tokenizer)


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(UserError, match="expected a fast one"):
        encode_answers("a", [(0, 1)], SimpleNamespace(is_fast=False))
