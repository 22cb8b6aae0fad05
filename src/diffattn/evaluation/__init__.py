"""Measures of trained models on held-out data, with paired intervals."""

from diffattn.evaluation.answers import AnswerOutcome, answer_outcomes
from diffattn.evaluation.attention import AttentionShares, attention_shares
from diffattn.evaluation.intervals import Comparison, compare_to_first, paired_interval
from diffattn.evaluation.lam import lam_by_layer
from diffattn.evaluation.loss import item_losses, window_losses
from diffattn.evaluation.recall import RecallOutcome, recall_outcomes
from diffattn.evaluation.speed import take_turns, training_rates

__all__ = [
    "AnswerOutcome",
    "AttentionShares",
    "Comparison",
    "RecallOutcome",
    "answer_outcomes",
    "attention_shares",
    "compare_to_first",
    "item_losses",
    "lam_by_layer",
    "paired_interval",
    "recall_outcomes",
    "take_turns",
    "training_rates",
    "window_losses",
]
