"""Orders of demonstrations: random, alternating by class, blocked by class."""

from collections.abc import Sequence

import numpy as np

from diffattn.data.many_shot import Example
from diffattn.errors import UserError

ORDERS = ("random", "alternating", "blocked")


def order_shots(
    shots: Sequence[Example], count: int, *, kind: str, order: int, seed: int = 0
) -> list[Example]:
    """The first demonstrations in one of their orders.

    Every demonstration and every class has a rank that belongs to the order alone, so a longer
    list keeps the order of a shorter one (within classes where classes alternate).

    Args:
        shots: all demonstrations.
        count: how many are used.
        kind: "random", "alternating" (an order of classes again and again, as far as each has
            demonstrations) or "blocked" (class after class).
        order: its number.
        seed: of all orders.

    Raises:
        UserError: an unknown kind, or more demonstrations than there are.

    Source: Ye et al., arXiv 2410.05258, section 3.4 (random, alternating); Bertsch et al., arXiv
        2405.00200 (blocked).
    """
    if kind not in ORDERS:
        raise UserError(f"kinds: expected some of {', '.join(ORDERS)}, got {kind!r}")
    if not 1 <= count <= len(shots):
        raise UserError(f"shots: expected 1 to {len(shots):,}, got {count:,}")
    rng = np.random.default_rng([seed, order])
    classes = sorted({label for _, label in shots})
    rank_of_class = dict(zip(classes, rng.permutation(len(classes)).tolist(), strict=True))
    rank = rng.permutation(len(shots)).tolist()
    chosen = [shots[n] for n in sorted(range(count), key=rank.__getitem__)]
    if kind == "random":
        return chosen
    if kind == "blocked":
        return sorted(chosen, key=lambda example: rank_of_class[example[1]])
    turns: dict[str, int] = {}
    keyed = []
    for example in chosen:
        turn = turns[example[1]] = turns.get(example[1], -1) + 1
        keyed.append((turn, rank_of_class[example[1]], example))
    return [example for *_, example in sorted(keyed)]
