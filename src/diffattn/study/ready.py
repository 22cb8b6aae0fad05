"""Models that are ready to train, one arm of a study each."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffattn.dex import DexCallback, DexConfig, HeadPlan, inject, unload
from diffattn.dex.adapter import FROZEN_ENTRIES
from diffattn.dex.base import load_base
from diffattn.errors import UserError, needs_extra
from diffattn.locks import held
from diffattn.models.convert import start_from_softmax
from diffattn.models.convert.softmax import shared_fields
from diffattn.nn import DiffAttention
from diffattn.study.trajectory import DexTrajectory, LamTrajectory, Trajectory
from diffattn.training import DiffTrainer
from diffattn.training.adaptation import DexTrainer


@dataclass
class Ready:
    """A model that is ready to train.

    Args:
        model: with its arm's parameters requiring gradients.
        trainer: makes the Trainer.
        callbacks: of the Trainer.
        trajectory: records lam on the way, where there is one.
        finish: turns the trained model into the one that is measured.
    """

    model: Any
    trainer: Callable[..., DiffTrainer] = DiffTrainer
    callbacks: list[Any] = field(default_factory=list)
    trajectory: Trajectory | None = None
    finish: Callable[[Any], Any] = lambda model: model


def trained_parameters(model: nn.Module) -> int:
    """Numbers that training may change: entries whose gradient is masked are not counted."""
    return sum(
        parameter.numel() - getattr(parameter, FROZEN_ENTRIES, 0)
        for parameter in model.parameters()
        if parameter.requires_grad
    )


def why_not(name: str, model: Any) -> str | None:
    """Why a model cannot have an arm; None where it can."""
    if name.startswith("retrofit"):
        try:
            shared_fields(model.config)
        except UserError as error:
            return f"no exact start as V2: {error}"
    if name == "full":
        with needs_extra("the memory of full fine-tuning", "hf"):
            import psutil
        # weights, gradients and two moments, all in fp32
        needed = 16 * sum(p.numel() for p in model.parameters())
        free = psutil.virtual_memory().available
        if needed > 0.8 * free:
            return f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    return None


def check_packages(names: tuple[str, ...]) -> None:
    """Refuse a study whose packages are not all installed.

    Raises:
        MissingExtraError: scipy is missing, or peft with LoRA among the arms.
    """
    with needs_extra("the intervals of a study", "eval"):
        import scipy  # noqa: F401
    if "lora" in names:
        with needs_extra("the arm lora", "peft"):
            import peft  # noqa: F401


def make_ready(
    name: str,
    base: Path,
    plan: HeadPlan,
    *,
    ramp_steps: int,
    lam_rate: float,
    seed: int,
    work: Path,
) -> Ready:
    """Load the base model and make it ready for an arm.

    Args:
        name: of the arm.
        base: folder of the base model.
        plan: heads that DEX extends.
        ramp_steps: T of lam's schedule.
        lam_rate: the learning rate of lam as a multiple of the others'.
        seed: of what is drawn.
        work: folder for what the arm needs on disk.

    Raises:
        UserError: the model cannot have this arm.
    """
    torch.manual_seed(seed)
    if name.startswith("retrofit"):
        return _retrofit(base, work, attention=name == "retrofit-attention")
    model = load_base(base)
    if name == "base":
        return Ready(model.requires_grad_(False))
    if name == "full":
        return Ready(model)
    if name == "lora":
        return _lora(model, plan, ramp_steps)
    changes: dict[str, Any] = {
        "attention": {"trains": "attention"},
        "floor": {"trains": "attention"},
        "dex": {},
        "extension": {"trains": "extension"},
        "pinned": {"lam": "pinned"},
        "plus": {"sign": 1},
    }[name]
    if name == "floor":
        model.set_attn_implementation("eager")
    inject(model, DexConfig(heads=plan.heads, ramp_steps=ramp_steps, **changes))
    trajectory = None if changes.get("trains") == "attention" else DexTrajectory()
    callbacks: list[Any] = [DexCallback()]
    trainer = partial(DexTrainer, lam_rate=lam_rate)
    return Ready(model, trainer, callbacks, trajectory)


def _lora(model: Any, plan: HeadPlan, ramp_steps: int) -> Ready:
    from peft import LoraConfig, get_peft_model

    inject(model, DexConfig(heads=plan.heads, ramp_steps=ramp_steps))
    wanted = trained_parameters(model)
    unload(model)

    def adapted(rank: int) -> Any:
        # the usual choice: the product counts twice whatever the rank
        return get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        )

    probe = adapted(1)
    rank = max(1, round(wanted / trained_parameters(probe)))
    model = probe.unload()
    return Ready(adapted(rank), finish=lambda trained: trained.merge_and_unload())


def _retrofit(base: Path, work: Path, *, attention: bool) -> Ready:
    start = work / "retrofit-start"
    with held(work / "retrofit-start.lock", wait=True):
        try:
            model = load_base(start)
        except UserError:  # not there yet, or damaged
            shutil.rmtree(start, ignore_errors=True)
            start_from_softmax(base, start, "v2", say=lambda line: None)
            model = load_base(start)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, DiffAttention):
            _train_noise(module)
            for part in (module.k_proj, module.v_proj, module.o_proj) if attention else ():
                part.requires_grad_(True)
    return Ready(model, trajectory=LamTrajectory())


def _train_noise(attention: DiffAttention) -> None:
    """Train the noise queries and lam of a layer: the rows of signal queries get no gradient."""
    attention.lam.requires_grad_(True)
    ratio, width = attention.sizes.ratio, attention.sizes.head_dim
    for parameter in attention.q_proj.parameters():
        parameter.requires_grad_(True)
        setattr(parameter, FROZEN_ENTRIES, parameter.numel() * ratio // (ratio + 1))

        def noise_alone(gradient: Tensor) -> Tensor:
            masked = gradient.clone()
            masked.unflatten(0, (-1, ratio + 1, width))[:, :ratio] = 0
            return masked

        parameter.register_hook(noise_alone)
