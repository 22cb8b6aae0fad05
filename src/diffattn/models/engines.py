"""What serving engines can hold that read the geometry of attention from the configuration."""

from diffattn.models.configuration_diff import DiffTransformerConfig

# by the names of their attention implementations
ENGINES = ("vllm", "sglang")


def check_engine(config: DiffTransformerConfig) -> None:
    """Refuse, for an engine, a model that it would serve with wrong numbers.

    Engines read heads and widths once, for all layers, and reshape what a layer hands over to
    them. Where another layer's products agree, as those of V1 and V2 often do, nothing fails.

    Args:
        config: of the model; its attention implementation says for whom it is built.

    Raises:
        NotImplementedError: layers differ in geometry, values are wider than keys, or the
            feed-forward layers have norms of their own.
    """
    engine = config._attn_implementation
    if engine not in ENGINES:
        return
    if config.hidden_act == "poly_norm":
        raise NotImplementedError(
            f"hidden_act: expected 'silu', got 'poly_norm', whose norms {engine} takes for others "
            "or splits between ranks"
        )
    check_one_geometry(config, engine)


def check_one_geometry(config: DiffTransformerConfig, engine: str) -> None:
    """Refuse a model whose layers need caches of different shapes.

    Args:
        config: of the model.
        engine: who sizes its cache for all layers alike; for the message.

    Raises:
        NotImplementedError: layers differ in geometry, or values are wider than keys.
    """
    first = config.kernel_geometry(0)
    for layer in range(config.num_hidden_layers):
        geometry = config.kernel_geometry(layer)
        if geometry != first:
            raise NotImplementedError(
                f"attention: {engine} serves layers of one geometry, but (query heads, key heads, "
                f"width) are {first} in layer 0 and {geometry} in layer {layer}"
            )
        if config.attention_kind(layer) == "softmax":
            continue
        width = config.diff_sizes(layer).value_dim
        if width > geometry[2]:
            raise NotImplementedError(
                f"wide_values: {engine} serves values as wide as keys, but in layer {layer} they "
                f"are {width} wide and keys {geometry[2]}"
            )
