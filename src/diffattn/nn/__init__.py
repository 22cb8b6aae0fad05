"""Layers of differential attention; imports torch and `diffattn.ops` alone."""

from diffattn.nn.attention import DiffAttention, DiffOptions, SoftmaxAttention
from diffattn.nn.cache import KeyValueCache
from diffattn.nn.fp32 import Fp32Module
from diffattn.nn.lambdas import ExponentialLambda, SigmoidLambda
from diffattn.nn.layer import AttentionLayer, LayerOptions
from diffattn.nn.norm import HeadNorm, RMSNorm
from diffattn.nn.poly_norm import PolyNorm
from diffattn.nn.sizes import DiffSizes, match_softmax, match_v1, match_v2

__all__ = [
    "AttentionLayer",
    "DiffAttention",
    "DiffOptions",
    "DiffSizes",
    "ExponentialLambda",
    "Fp32Module",
    "HeadNorm",
    "KeyValueCache",
    "LayerOptions",
    "PolyNorm",
    "RMSNorm",
    "SigmoidLambda",
    "SoftmaxAttention",
    "match_softmax",
    "match_v1",
    "match_v2",
]
