"""Head counts and widths of a differential layer that matches a Transformer of N heads."""

import inspect
import warnings
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffSizes:
    """Geometry of one differential attention layer."""

    num_diff_heads: int
    """H: signal heads, which are the output heads."""
    num_noise_heads: int
    """N: noise heads; each serves H/N signal heads."""
    num_key_value_heads: int
    """G: key/value heads; divides N, so that no pair reads two of them."""
    head_dim: int
    """D: width of queries and keys of one map."""
    value_dim: int
    """E: width of a value head and of an output head."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_diff_heads % self.num_noise_heads:
            raise ValueError(
                f"num_noise_heads: {self.num_noise_heads} noise heads do not divide "
                f"num_diff_heads = {self.num_diff_heads}"
            )
        if self.num_noise_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_key_value_heads} key/value heads do not divide "
                f"{self.num_noise_heads} noise heads, so a pair would read two of them"
            )

    @property
    def ratio(self) -> int:
        """R = H/N: signal heads that share one noise head."""
        return self.num_diff_heads // self.num_noise_heads


def match_v1(
    hidden_size: int,
    *,
    match_heads: int | None = None,
    match_key_value_heads: int | None = None,
    num_diff_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    ratio: int = 1,
) -> DiffSizes:
    """Sizes of a V1 (or grouped) layer: query width kept, heads halved, values twice as wide.

        D = hidden_size / N,  H = N / 2,  G = N_kv / 2,  E = 2 D

    Args:
        hidden_size: model width.
        match_heads: N, heads of the Transformer to match.
        match_key_value_heads: N_kv of that Transformer; None means N.
        num_diff_heads: H, instead of (or against) `match_heads`; then D = hidden_size / 2 H.
        num_key_value_heads: G, instead of `match_key_value_heads`.
        head_dim: D, where it does not follow from the width.
        ratio: r signal heads to one noise head.

    Returns:
        The sizes; H E = hidden_size unless `head_dim` says otherwise.

    Raises:
        ValueError: heads do not divide; the message gives the numbers.

    Warns:
        UserWarning: `num_diff_heads` keeps more heads than N / 2 and so narrows the queries,
            which is what the authors name first when the gain does not reproduce.

    Example:
        >>> match_v1(256, match_heads=8)
        DiffSizes(num_diff_heads=4, num_noise_heads=4, num_key_value_heads=4, head_dim=32, value_dim=64)

    Source: Ye et al., arXiv 2410.05258, section 2.2: h = d_model / 2d.
    """  # noqa: E501
    if match_heads is not None:
        if head_dim is None:
            _check_divides("match_heads", match_heads, "hidden_size", hidden_size)
        if match_heads % 2:
            raise ValueError(
                f"match_heads: V1 pairs the heads, so it needs an even number, got {match_heads}"
            )
    halved = num_diff_heads is None
    if num_diff_heads is None:
        if match_heads is None:
            raise ValueError("match_heads: give match_heads or num_diff_heads")
        num_diff_heads = match_heads // 2
    if head_dim is None:
        if num_diff_heads < 1 or hidden_size % (2 * num_diff_heads):
            raise ValueError(
                f"num_diff_heads: {num_diff_heads} pairs of heads do not divide hidden_size = "
                f"{hidden_size}"
            )
        head_dim = hidden_size // (2 * num_diff_heads)
        if match_heads is not None and head_dim < hidden_size // match_heads:
            warnings.warn(
                f"num_diff_heads={num_diff_heads} narrows head_dim to {head_dim}, where the "
                f"Transformer of {match_heads} heads has {hidden_size // match_heads}; "
                f"num_diff_heads={match_heads // 2} keeps it",
                stacklevel=_frames_of_package(),
            )
    if ratio < 1 or num_diff_heads % ratio:
        source = "match_heads / 2 = " if halved else ""
        raise ValueError(
            f"ratio: {ratio} does not divide num_diff_heads = {source}{num_diff_heads}"
        )
    noise_heads = num_diff_heads // ratio
    if num_key_value_heads is None:
        if match_key_value_heads is None:
            num_key_value_heads = noise_heads
        elif match_key_value_heads % 2:
            raise ValueError(
                "match_key_value_heads: V1 pairs the key heads, so it needs an even number, got "
                f"{match_key_value_heads}"
            )
        else:
            num_key_value_heads = match_key_value_heads // 2
            if noise_heads % max(num_key_value_heads, 1):
                raise ValueError(
                    f"match_key_value_heads: {match_key_value_heads} of the Transformer are "
                    f"{num_key_value_heads} here, which do not divide {noise_heads} noise heads"
                )
    return DiffSizes(
        num_diff_heads=num_diff_heads,
        num_noise_heads=noise_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        value_dim=2 * head_dim,
    )


def match_v2(
    hidden_size: int,
    *,
    match_heads: int,
    match_key_value_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    ratio: int = 1,
) -> DiffSizes:
    """Sizes of a V2 (or grouped latent) layer: N output heads, N + N/r queries, keys as they were.

        H = N,  G = N_kv,  E = D

    Args:
        hidden_size: model width.
        match_heads: N, heads of the Transformer to match.
        match_key_value_heads: N_kv of that Transformer; None means one for each noise head.
        head_dim: D; None means hidden_size / N.
        value_dim: E; None means D.
        ratio: r signal heads to one noise head.

    Returns:
        The sizes.

    Raises:
        ValueError: heads do not divide; the message gives the numbers.

    Source: Differential Transformer V2, Ye et al., January 2026.
    """
    if head_dim is None:
        _check_divides("match_heads", match_heads, "hidden_size", hidden_size)
        head_dim = hidden_size // match_heads
    if ratio < 1 or match_heads % ratio:
        raise ValueError(f"ratio: {ratio} does not divide match_heads = {match_heads}")
    noise_heads = match_heads // ratio
    groups = noise_heads if match_key_value_heads is None else match_key_value_heads
    if groups < 1 or noise_heads % groups:
        raise ValueError(
            f"match_key_value_heads: {groups} key/value heads do not divide {noise_heads} noise "
            "heads, so a pair would read two of them"
        )
    return DiffSizes(
        num_diff_heads=match_heads,
        num_noise_heads=noise_heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
    )


def match_softmax(
    hidden_size: int, *, num_heads: int, num_key_value_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Key/value heads and head width of a softmax layer, with the defaults filled in.

    Raises:
        ValueError: heads do not divide; the message gives the numbers.
    """
    if head_dim is None:
        _check_divides("num_heads", num_heads, "hidden_size", hidden_size)
        head_dim = hidden_size // num_heads
    groups = num_heads if num_key_value_heads is None else num_key_value_heads
    if min(num_heads, groups) < 1 or num_heads % groups:
        raise ValueError(f"num_key_value_heads: {groups} does not divide num_heads = {num_heads}")
    return groups, head_dim


def _check_divides(name: str, divisor: int, whole_name: str, whole: int) -> None:
    if divisor < 1 or whole % divisor:
        raise ValueError(f"{name}: {divisor} does not divide {whole_name} = {whole}")


def _frames_of_package() -> int:
    """Stack level of a warning that shows the caller's line, however deep the preset is."""
    package = str(Path(__file__).parent.parent)
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level
