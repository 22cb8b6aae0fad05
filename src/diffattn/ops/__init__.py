"""Differential attention as functions of tensors; imports torch alone."""

from diffattn.ops.attention import diff_attention, softmax_attention
from diffattn.ops.choice import IMPLEMENTATIONS
from diffattn.ops.difference import subtract_maps, subtract_outputs
from diffattn.ops.lambdas import exponential_lambda, lambda_init, sigmoid_lambda
from diffattn.ops.layout import join_stripes, split_stripes
from diffattn.ops.one_call import stack_keys, stack_queries
from diffattn.ops.patterns import (
    alibi_bias,
    document_mask,
    documents_of_lengths,
    documents_of_positions,
    padding_mask,
    prefix_mask,
)
from diffattn.ops.reference import diff_attention_maps
from diffattn.ops.rotary import apply_rotary, rotary_angles

__all__ = [
    "IMPLEMENTATIONS",
    "alibi_bias",
    "apply_rotary",
    "diff_attention",
    "diff_attention_maps",
    "document_mask",
    "documents_of_lengths",
    "documents_of_positions",
    "exponential_lambda",
    "join_stripes",
    "lambda_init",
    "padding_mask",
    "prefix_mask",
    "rotary_angles",
    "sigmoid_lambda",
    "softmax_attention",
    "split_stripes",
    "stack_keys",
    "stack_queries",
    "subtract_maps",
    "subtract_outputs",
]
