"""A cache handed to a model by the name that its version of transformers uses."""

import inspect
from typing import Any


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Arguments that let a model read and extend a cache.

    Args:
        model: of Hugging Face's interface.
        cache: of transformers.

    Returns:
        Keyword arguments of the model's call.
    """
    known = inspect.signature(getattr(model, "forward", model)).parameters
    name = "cache" if "cache" in known else "past_key_values"  # its name before 5.24
    return {name: cache, "use_cache": True}
