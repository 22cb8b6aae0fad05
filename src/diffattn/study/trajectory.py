"""lam and the size of what it subtracts, layer by layer, while a model trains."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diffattn.dex.adapter import adapter_of
from diffattn.nn import DiffAttention
from diffattn.whole_file import write_json

POINTS = 20


class Trajectory(TrainerCallback):
    """Records what layers do in the forward passes of some steps, exact through a resume.

    About `POINTS` steps are recorded, the first and the last among them. Each record has `step`
    (optimizer steps done before the pass) and, by layer, what the subclass measures.

    Attributes:
        path: JSON file of the records; set before training starts.
        records: so far.
    """

    path: Path

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.now: dict[str, dict[int, float]] | None = None
        self.handles: list[Any] = []

    def attach(self, model: nn.Module) -> None:
        """Put hooks into the model."""
        raise NotImplementedError

    def keep(self, name: str, layer: int, value: Tensor | float) -> None:
        """Note a value of a layer, where this step is recorded; the first pass of a step counts."""
        if self.now is not None:
            self.now.setdefault(name, {}).setdefault(layer, float(value))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up what was recorded before the checkpoint."""
        if state.global_step and self.path.exists():
            known = json.loads(self.path.read_text(encoding="utf-8"))
            self.records = [r for r in known if r["step"] < state.global_step]
        self.attach(kwargs["model"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record this step or not."""
        every = max(1, state.max_steps // POINTS)
        due = state.global_step % every == 0 or state.global_step == state.max_steps - 1
        self.now = {} if due else None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the record."""
        if self.now is not None:
            values = {
                name: [found[layer] for layer in sorted(found)] for name, found in self.now.items()
            }
            self.records.append({"step": state.global_step - 1, **values})
            write_json(self.path, self.records)
            self.now = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the hooks out."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class DexTrajectory(Trajectory):
    """lam(t) and |Delta| / |O| of selected heads, Delta = lam O W_D, norms over all tokens."""

    def attach(self, model: nn.Module) -> None:
        """Listen to each extension."""
        for layer, extension in adapter_of(model).parts.items():
            self.handles.append(extension.register_forward_hook(self._hook(layer)))

    def _hook(self, layer: int) -> Any:
        @torch.no_grad()
        def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            if self.now is None:
                return
            size = (module.num_heads, module.value_dim)
            before = args[0].unflatten(-1, size)[..., module.index, :].float()
            # computed once more: output - input would be lost in 16 bits
            self.keep("lam", layer, module.lam().mean())
            self.keep("ratio", layer, module.change(before).norm() / before.norm())

        return hook


class LamTrajectory(Trajectory):
    """Mean lam over tokens and heads of a differential model."""

    def attach(self, model: nn.Module) -> None:
        """Listen to the lam of each layer."""
        layers = [m for m in model.modules() if isinstance(m, DiffAttention)]
        for layer, attention in enumerate(layers):
            self.handles.append(attention.lam.register_forward_hook(self._hook(layer)))

    def _hook(self, layer: int) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if self.now is not None:
                self.keep("lam", layer, output.float().mean())

        return hook
