"""Arithmetic of one training token."""

from diffattn.models.modeling_diff import DiffTransformerForCausalLM


def training_flops_per_token(model: DiffTransformerForCausalLM, length: int) -> float:
    """FLOPs of forward and backward for one token, as the stock attention call executes them.

        6 P + 3 sum_layers heads (W + E) length

    P counts the weights of all matrix products (the output layer too, the embedding look-up
    not); heads, W and E are the kernel's query heads, key width and value width. A causal query
    sees length/2 keys on average, at 2 FLOPs for each product; backward costs twice the forward.

    Args:
        model: the model.
        length: tokens of a sequence.

    Returns:
        FLOPs per token.
    """
    config = model.config
    matrices = sum(
        parameter.numel()
        for name, parameter in model.model.named_parameters()
        if parameter.dim() >= 2 and "embed_tokens" not in name
    )
    matrices += model.lm_head.weight.numel()
    attention = 0
    for index in range(config.num_hidden_layers):
        heads, _, width = config.kernel_geometry(index)
        softmax = config.attention_kind(index) == "softmax"
        value_width = width if softmax else config.diff_sizes(index).value_dim
        attention += heads * (width + value_width) * length
    return 6.0 * matrices + 3.0 * attention
