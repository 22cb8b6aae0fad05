"""Whether a target layout, read back, says all that our configuration said."""

from collections.abc import Collection
from typing import Any

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffChoices, DiffTransformerConfig

# no logit of a trained model depends on these, or they are compared through others
NOT_COMPARED = (
    "initializer_range",
    "lambda_std",
    "use_cache",
    "match_key_value_heads",
    "match_head_dim",
    "noise_ratio",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def refuse_lost(
    target: str,
    config: DiffTransformerConfig,
    again: DiffTransformerConfig,
    *,
    besides: Collection[str] = (),
) -> None:
    """Refuse a target that would be read back as another model.

    Every field of the configuration is compared by what it means in each layer, so an option that
    is added later is refused until a target learns to hold it.

    Args:
        target: name for the message.
        config: what is converted.
        again: what the target is read back with.
        besides: fields that the conversion moves into the tensors, or that are not the target's.

    Raises:
        UserError: a field differs; the message names it and its first layer.
    """
    got, kept = _meaning(config), _meaning(again)
    for name, value in got.items():
        if name in besides or value == kept[name]:
            continue
        if not isinstance(value, tuple):
            raise UserError(f"{name}: {target} has {kept[name]!r}, got {value!r}")
        pairs = enumerate(zip(kept[name], value, strict=True))
        layer, (has, asked) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        raise UserError(f"{name}: {target} has {has!r}, got {asked!r} in layer {layer}")


def _meaning(config: DiffTransformerConfig) -> dict[str, Any]:
    """Value of each field, a tuple where layers may differ."""
    layers = range(config.num_hidden_layers)
    plain = [config.attention_kind(layer) == "softmax" for layer in layers]
    choices = [None if plain[layer] else config.diff_choices(layer) for layer in layers]
    names = ("lambda_start", "lambda_layer_offset", *DiffTransformerConfig.__annotations__)
    meant = {name: getattr(config, name) for name in names if name not in NOT_COMPARED}
    meant["attention"] = tuple("softmax" if each else "differential" for each in plain)
    for name in DiffChoices._fields:
        meant[name] = tuple(each and getattr(each, name) for each in choices)
    del meant["match_heads"]  # what is wide by choice is named by the choice, so sizes come last
    meant["match_heads"] = tuple(
        config.kernel_geometry(layer) if plain[layer] else config.diff_sizes(layer)
        for layer in layers
    )
    meant["sliding_window"] = tuple(config.window(layer) for layer in layers)
    if config.attention_output_bias is None:
        meant["attention_output_bias"] = config.attention_bias
    if not config.qk_norm and not any(each and each.head_norm for each in choices):
        meant["head_norm_eps"] = None
    elif config.head_norm_eps is None:
        meant["head_norm_eps"] = config.rms_norm_eps
    if not any(each and each.has_lambda_init for each in choices):
        meant |= {"lambda_start": None, "lambda_layer_offset": 0}
    return meant
