"""The arms of a study: what each one trains."""

from dataclasses import dataclass

from diffattn.errors import UserError

CLAIM = ("attention", "dex")
"""the control and the method"""


@dataclass(frozen=True)
class StudyArm:
    """An arm by its name.

    Args:
        name: on the command line.
        title: in reports.
        about: what trains, in a few words.
        rate: usual learning rate, the centre of tuning; None trains nothing.
        like: name of the arm whose tuned rate this one takes.
    """

    name: str
    title: str
    about: str
    rate: float | None
    like: str | None = None


ARMS = (
    StudyArm("base", "base model", "nothing trains", None),
    StudyArm("attention", "attention only", "W_K, W_V, W_O; the control of DEX", 1e-4),
    StudyArm("dex", "DEX", "W_K, W_V, W_O, W_D and lam", 1e-4),
    StudyArm("extension", "extension only", "W_D and lam", 1e-3),
    StudyArm("lora", "LoRA", "low-rank maps beside all linear maps, as many parameters", 3e-4),
    StudyArm(
        "retrofit", "retrofit to V2", "noise queries and lam of an exact start as V2", 3e-4
    ),
    StudyArm(
        "floor", "attention only, once more",
        "as attention with seed 0, rounded in another way: the noise floor", 1e-4,
        like="attention",
    ),
    StudyArm("pinned", "DEX, lam pinned", "as DEX with lam at lambda_init", 1e-4),
    StudyArm("plus", "DEX, plus sign", "as DEX, the map added", 1e-4),
    StudyArm(
        "retrofit-attention", "retrofit to V2 and attention",
        "noise queries, lam, W_K, W_V, W_O", 1e-4,
    ),
    StudyArm("full", "full fine-tuning", "all parameters", 3e-5),
)  # fmt: skip


def arm_named(name: str) -> StudyArm:
    """The arm of a name.

    Raises:
        UserError: there is none.
    """
    for arm in ARMS:
        if arm.name == name:
            return arm
    names = ", ".join(arm.name for arm in ARMS)
    raise UserError(f"arms: expected names out of {names}, got {name!r}")
