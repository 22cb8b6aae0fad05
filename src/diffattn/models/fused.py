"""The compiled CPU kernel behind Hugging Face's attention interface, for any model."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from diffattn.ops import softmax_attention
from diffattn.ops.fused import is_available

NAME = "diffattn_fused"


def use_fused(model: Any) -> bool:
    """Let a model on a CPU attend by the compiled kernel, where the machine can have it.

    Args:
        model: of transformers, on its device.

    Returns:
        Whether it does now.
    """
    if model.device.type != "cpu" or not is_available():
        return False
    model.set_attn_implementation(NAME)
    return True


def seen_in_order(mask: object, length: int, key: Tensor, value: Tensor, *, causal: bool) -> Any:
    """What a mask of None means, which transformers leaves to the kernel.

    Args:
        mask: None, or what says everything about order.
        length: T.
        key: [B, G, S, W]; more than T of them, and no mask, are the slots of an empty cache.
        value: [B, G, S, E].
        causal: whether the layer looks at earlier keys alone.

    Returns:
        Whether the operator is to be causal, and the keys and values that it is to read.
    """
    causal = causal and mask is None and length > 1
    if causal and key.shape[2] > length:
        key, value = key[:, :, :length], value[:, :, :length]
    return causal, key, value


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention call by the compiled kernel: softmax(query key^T scaling + mask) value.

    Args:
        module: the calling layer; `module.is_causal` where `is_causal` is None.
        query: [B, heads, T, W].
        key: [B, G, S, W].
        value: [B, G, S, E].
        attention_mask: bool or additive, broadcastable to [B, heads, T, S].
        scaling: factor of the scores.
        dropout: probability of dropping an entry of the map; refused if not 0.
        is_causal: whether keys after the query are hidden where there is no mask.
        softcap: refused.
        s_aux: [heads] sink logits.
        **kwargs: what other implementations read.

    Returns:
        Outputs [B, T, heads, E], and None in place of maps.

    Raises:
        NotImplementedError: dropout, a soft cap, a gradient of the mask, or no CPU or compiler.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal, key, value = seen_in_order(attention_mask, query.shape[2], key, value, causal=causal)
    heads = softmax_attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        causal=causal,
        mask=attention_mask,
        scale=scaling,
        softcap=softcap,
        sink=s_aux,
        dropout=dropout,
        impl="fused",
    )
    return heads, None


AttentionInterface.register(NAME, fused_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
