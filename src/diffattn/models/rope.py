"""The rotary parameters of transformers' configurations: the models know the plain ones."""

from typing import Any

NAMES = ("rope_parameters", "rope_scaling")  # today's and the older name of one dictionary


def plain_rope_theta(name: str, parameters: Any, otherwise: float) -> float:
    """The base of plain rotary positions.

    Args:
        name: of the dictionary, for messages.
        parameters: as transformers writes them; None says nothing.
        otherwise: the base where they name none.

    Raises:
        ValueError: they are no dictionary, or ask for anything but plain rotary positions over
            the whole head width, which the models would pass over without a word.
    """
    if parameters is None:
        return otherwise
    if not isinstance(parameters, dict):
        raise ValueError(f"{name}: expected a dictionary, got {parameters!r}")
    for key in ("rope_type", "type"):
        if parameters.get(key) not in (None, "default"):
            raise ValueError(f"rope_type: expected 'default', got {parameters[key]!r}")
    for key, value in parameters.items():
        plain = key in ("rope_type", "type", "rope_theta") or value is None
        if not plain and (key, value) != ("partial_rotary_factor", 1):
            raise ValueError(
                f"{name}: expected rope_type 'default' and rope_theta alone, got {key} = {value!r}"
            )
    theta = parameters.get("rope_theta")
    return otherwise if theta is None else theta
