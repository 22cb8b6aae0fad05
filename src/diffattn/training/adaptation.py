"""The Trainer for models with DEX: their groups, their checkpoints."""

from pathlib import Path
from typing import Any

from torch import nn

from diffattn.dex.adapter import EXTENSION
from diffattn.dex.storage import read_into, save
from diffattn.training.trainer import DiffTrainer


def dex_parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, lam_rate: float = 1.0
) -> list[dict[str, Any]]:
    """Parameters of an adaptation in three groups: projections, matrices W_D, lam.

    Args:
        model: one with DEX injected; what requires gradients is grouped.
        learning_rate: of the projections and matrices.
        weight_decay: of the projections' matrices.
        lam_rate: the learning rate of lam as a multiple of the others'.

    Returns:
        Groups with "params", "names", "lr" and "weight_decay"; empty groups are left out.
    """
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {
        "projections": [],
        "matrices": [],
        "lam": [],
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_lam = name.endswith(f".{EXTENSION}.lambda_learn")
            kind = "lam" if is_lam else "projections"
            groups["matrices" if f".{EXTENSION}.weight" in name else kind].append((name, parameter))
    return [
        {
            "params": [parameter for _, parameter in members],
            "names": [name for name, _ in members],
            "lr": learning_rate * (lam_rate if kind == "lam" else 1.0),
            "weight_decay": weight_decay if kind == "projections" else 0.0,
        }
        for kind, members in groups.items()
        if members
    ]


class DexTrainer(DiffTrainer):
    """`DiffTrainer` whose checkpoints hold the adapter, not the model.

    Give it a `DexCallback` too, which keeps the schedule of lam.

    Args:
        lam_rate: the learning rate of lam as a multiple of the others'.
        **kwargs: keyword arguments of `transformers.Trainer`.
    """

    def __init__(self, *, lam_rate: float = 1.0, **kwargs: Any) -> None:
        self.lam_rate = lam_rate
        super().__init__(**kwargs)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The groups of `dex_parameter_groups`."""
        return dex_parameter_groups(
            model,
            learning_rate=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
            lam_rate=self.lam_rate,
        )

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        if self.args.should_save:
            folder: Any = self.args.output_dir if output_dir is None else output_dir
            save(self.accelerator.unwrap_model(self.model), folder)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        plain = self.accelerator.unwrap_model(self.model if model is None else model)
        read_into(plain, Path(resume_from_checkpoint))
