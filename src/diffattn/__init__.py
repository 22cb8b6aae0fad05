"""Differential attention for PyTorch.

    out = (softmax(q k^T s + M) - lam * softmax(q' k'^T s + M)) v

`diffattn.ops` holds the operator, `diffattn.nn` the layers; both need torch alone.
`diffattn.models` adds the language models (extra `hf`).
"""

from diffattn.nn import DiffAttention, KeyValueCache, RMSNorm, SoftmaxAttention
from diffattn.ops import (
    diff_attention,
    diff_attention_maps,
    exponential_lambda,
    lambda_init,
    sigmoid_lambda,
    softmax_attention,
)

__version__ = "0.1.0"

__all__ = [
    "DiffAttention",
    "KeyValueCache",
    "RMSNorm",
    "SoftmaxAttention",
    "__version__",
    "diff_attention",
    "diff_attention_maps",
    "exponential_lambda",
    "lambda_init",
    "sigmoid_lambda",
    "softmax_attention",
]
