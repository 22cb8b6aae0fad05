"""Keys and values of earlier steps, for generation with a single layer."""

import torch
from torch import Tensor


class KeyValueCache:
    """Grows by concatenation along the time axis.

    One cache serves one layer. Keys and values have the layer's own widths, which differ:
    a V1 layer stores keys [B, S, G, 2 D] = [k | k'] and values [B, S, G, 2 D].
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __len__(self) -> int:
        """Number of positions held."""
        return 0 if self.keys is None else self.keys.shape[1]

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What is held with keys and values [B, T, G, width] behind it; the cache stays as it is.

        Raises:
            ValueError: batch, heads or widths are not those of what is held.
        """
        if self.keys is None or self.values is None:
            return keys, values
        for name, old, new in (("keys", self.keys, keys), ("values", self.values, values)):
            if (old.shape[0], *old.shape[2:]) != (new.shape[0], *new.shape[2:]):
                raise ValueError(
                    f"cache: holds {name} of shape {tuple(old.shape)}, got {tuple(new.shape)}"
                )
        return torch.cat((self.keys, keys), dim=1), torch.cat((self.values, values), dim=1)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, T, G, width]; return all that are held."""
        self.keys, self.values = self.joined(keys, values)
        return self.keys, self.values
