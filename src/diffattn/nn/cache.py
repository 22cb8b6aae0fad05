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

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, T, G, width]; return all that are held."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat((self.keys, keys), dim=1)
            values = torch.cat((self.values, values), dim=1)
        self.keys, self.values = keys, values
        return keys, values
