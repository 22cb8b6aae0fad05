"""What each field of the configuration may hold, and which are built into a model."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS = ("silu", "poly_norm")


class Field(NamedTuple):
    """The values of one field."""

    expects: str
    accepts: Callable[[Any], bool]
    built_in: bool = True
    """whether a model reads it when it is built, and computes something else for another value"""

    def read_later(self) -> "Field":
        """The same for a field that a model reads as it runs, or that decides no output."""
        return self._replace(built_in=False)

    def or_none(self) -> "Field":
        """The same, or None."""
        return Field(f"{self.expects}, or None", lambda value: value is None or self.accepts(value))

    def or_list(self) -> "Field":
        """The same, or a list of them."""
        return Field(
            f"{self.expects}, or a list of them",
            lambda value: all(map(self.accepts, value if isinstance(value, list) else [value])),
        )

    def list_of(self) -> "Field":
        """A list of such values."""
        return Field(
            f"a list of {self.expects}",
            lambda value: isinstance(value, (list, tuple)) and all(map(self.accepts, value)),
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and math.isfinite(value)


def _one_of(allowed: tuple[str, ...]) -> Field:
    return Field(f"one of {allowed}", lambda value: isinstance(value, str) and value in allowed)


_FLAG = Field("True or False", lambda value: isinstance(value, bool))
_WHOLE = Field("a whole number", _is_whole)
_COUNT = Field("a whole number from 1", lambda value: _is_whole(value) and value >= 1)
_NUMBER = Field("a finite number", _is_number)
_NOT_NEGATIVE = Field("a number from 0", lambda value: _is_number(value) and value >= 0)
_POSITIVE = Field("a number above 0", lambda value: _is_number(value) and value > 0)
_PROBABILITY = Field("a probability in [0, 1)", lambda value: _is_number(value) and 0 <= value < 1)


def fields(attention_kinds: tuple[str, ...]) -> Mapping[str, Field]:
    """The table of all fields but those that are derived.

    Args:
        attention_kinds: names that `attention` may hold.
    """
    return {
        # resizing the embeddings changes it
        "vocab_size": _COUNT.read_later(),
        "hidden_size": _COUNT,
        "intermediate_size": _COUNT.or_none(),
        "num_hidden_layers": _COUNT,
        "attention": _one_of(attention_kinds).or_list(),
        "match_heads": _COUNT,
        "match_key_value_heads": _COUNT.or_none(),
        "match_head_dim": _COUNT.or_none(),
        "noise_ratio": _COUNT,
        "lam": _one_of(("exponential", "sigmoid")).or_none(),
        "lam_per": _one_of(("layer", "head", "group")).or_none(),
        "own_noise_key": _FLAG.or_none(),
        "head_norm": _FLAG.or_none(),
        "wide_values": _FLAG.or_none(),
        "output_gate": _FLAG.or_none(),
        "qk_norm": _FLAG,
        "attention_sink": _FLAG,
        "attention_softcap": _POSITIVE.or_none(),
        "attention_bias": _FLAG,
        "attention_output_bias": _FLAG.or_none(),
        "hidden_act": _one_of(ACTIVATIONS),
        "sliding_window": _COUNT.or_none(),
        "layer_types": _one_of(LAYER_TYPES).list_of().or_none(),
        "rope_theta": _POSITIVE.read_later(),
        "max_position_embeddings": _COUNT.read_later(),
        "rms_norm_eps": _NOT_NEGATIVE,
        "head_norm_eps": _NOT_NEGATIVE.or_none(),
        "initializer_range": _NOT_NEGATIVE.or_none().read_later(),
        "scale_embeddings": _FLAG,
        "lambda_std": _NOT_NEGATIVE.read_later(),
        "lambda_start": _NUMBER.or_none(),
        "lambda_layer_offset": _WHOLE,
        "attention_dropout": _PROBABILITY.read_later(),
        "tie_word_embeddings": _FLAG.read_later(),
        "use_cache": _FLAG.read_later(),
        "bos_token_id": _WHOLE.or_none().read_later(),
        "eos_token_id": _WHOLE.or_list().or_none().read_later(),
        "pad_token_id": _WHOLE.or_none().read_later(),
    }


def check_fields(config: object, table: Mapping[str, Field]) -> None:
    """Refuse the first value that its field may not hold.

    Raises:
        ValueError: the message names the field, what was expected and what came.
    """
    for name, field in table.items():
        value = getattr(config, name)
        if not field.accepts(value):
            raise ValueError(f"{name}: expected {field.expects}, got {value!r}")
