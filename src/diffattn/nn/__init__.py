"""Layers of differential attention; imports torch and `diffattn.ops` alone."""

from diffattn.nn.attention import DiffAttention, SoftmaxAttention
from diffattn.nn.cache import KeyValueCache
from diffattn.nn.lambdas import ExponentialLambda, SigmoidLambda
from diffattn.nn.layer import AttentionLayer
from diffattn.nn.norm import RMSNorm
from diffattn.nn.sizes import DiffSizes, match_v1, match_v2

__all__ = [
    "AttentionLayer",
    "DiffAttention",
    "DiffSizes",
    "ExponentialLambda",
    "KeyValueCache",
    "RMSNorm",
    "SigmoidLambda",
    "SoftmaxAttention",
    "match_v1",
    "match_v2",
]
