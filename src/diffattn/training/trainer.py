"""The Hugging Face Trainer with our data order, parameter groups and guarded checkpoints."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from diffattn.errors import UserError
from diffattn.training.checkpoints import latest_checkpoint, mark_complete
from diffattn.training.config import TrainConfig
from diffattn.training.metrics import MetricsLog, read_metrics
from diffattn.training.monitor import SpikeMonitor
from diffattn.training.optimizer import parameter_groups

Progress = Callable[[int, int, float], None]

_logger = logging.getLogger(__name__)


class Interrupted(Exception):  # noqa: N818 a request that was honoured, not an error
    """Training stopped when asked to; the checkpoint holds all of it."""


class DiffTrainer(Trainer):
    """`transformers.Trainer` that reads its data set in order.

    Differs from its parent: sequences come in the data set's order (which is a function of the
    seed), weight decay spares lambda, norms and biases, a checkpoint is marked when all of it is
    written, and on CPUs what would silently become something else is refused.

    Args:
        **kwargs: keyword arguments of `transformers.Trainer`.

    Raises:
        UserError: FSDP is requested on a CPU, where DDP would run; or several processes on CPUs
            without `use_cpu=True`, where each would train by itself.
    """

    def __init__(self, **kwargs: Any) -> None:
        args: TrainingArguments = kwargs["args"]
        if args.device.type == "cpu":
            _refuse_silent_replacements(args)
        super().__init__(**kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The groups of `parameter_groups`."""
        return parameter_groups(model, self.args.weight_decay)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments over `groups`."""
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            groups = self.groups(trained)
            for group in groups:
                del group["names"]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # each process writes its generators' state
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial))
            folder /= f"checkpoint-{self.state.global_step}"
            # a pickle of the arguments, which nothing reads
            (folder / "training_args.bin").unlink(missing_ok=True)
            mark_complete(folder)


def _refuse_silent_replacements(args: TrainingArguments) -> None:
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise UserError(
            "fsdp: expected an accelerator, got a CPU, where Accelerate would silently run DDP; "
            "leave fsdp out to train with DDP, or load the model with "
            "distributed_config=DistributedConfig(fsdp_size=...) to shard it"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size != started:
        raise UserError(
            f"use_cpu: expected True for {started} processes on CPUs, got False, where each would "
            "train by itself"
        )


class _Heartbeat(TrainerCallback):
    """Tells how far training is, and saves and stops when asked to."""

    def __init__(
        self,
        metrics: MetricsLog,
        on_progress: Progress | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.metrics, self.on_progress, self.should_stop = metrics, on_progress, should_stop
        self.stopped = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the step; look for a request to stop."""
        if self.on_progress is not None:
            self.on_progress(state.global_step, state.max_steps, self.metrics.seconds)
        done = state.global_step >= state.max_steps
        if not done and self.should_stop is not None and _anywhere(self.should_stop(), args):
            control.should_save = control.should_training_stop = self.stopped = True


def _anywhere(asked: bool, args: TrainingArguments) -> bool:
    """Whether any process was asked: all of them must stop after the same step."""
    if args.world_size == 1:
        return asked
    total = torch.tensor(float(asked), device=args.device)
    dist.all_reduce(total)
    return bool(total.item())


def train(
    model: nn.Module,
    stream: Any,
    config: TrainConfig,
    folder: Path,
    *,
    measure: Callable[[nn.Module], float] | None = None,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    trainer_class: Callable[..., DiffTrainer] = DiffTrainer,
    callbacks: Sequence[TrainerCallback] = (),
) -> list[str]:
    """Train a causal language model, going on from the newest complete checkpoint in `folder`.

    Args:
        model: a Hugging Face model that returns its loss.
        stream: map-style data set in training order with at least steps x rows_per_step items
            of equal size, each with "input_ids" and "labels" [sequences, length], and
            `kind(step)`, within which losses compare; `diffattn.data.TrainingStream` is one.
        config: settings of the run.
        folder: gets `metrics.jsonl` and checkpoints.
        measure: gives the held-out loss of the model in nats per token.
        on_progress: called after each step with step, steps and seconds of training.
        should_stop: asked after each step; True in any process saves a checkpoint and stops.
        trainer_class: makes the Trainer.
        callbacks: called before those of this function.

    Returns:
        Warnings of the monitor.

    Raises:
        Interrupted: `should_stop` asked for it; a checkpoint was saved.
        DivergedError: loss or gradient norm is not finite.
        UserError: the rows of a step do not divide among the processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = _arguments(config, folder)
    monitor = SpikeMonitor(kind_of=stream.kind if config.log_every == 1 else None)
    metrics = MetricsLog(
        folder / "metrics.jsonl",
        tokens_per_step=config.rows_per_step * stream[0]["input_ids"].size,
        measure=measure,
        measure_every=config.measure_every,
        warnings=monitor.warnings,
    )
    heartbeat = _Heartbeat(metrics, on_progress, should_stop)
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=stream,
        data_collator=_collate,
        callbacks=[*callbacks, monitor, metrics, heartbeat],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None:
        _logger.info("resuming from %s", checkpoint)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if heartbeat.stopped:
        raise Interrupted(f"stopped at step {trainer.state.global_step} of {config.steps}")
    lines = read_metrics(metrics.path)  # from before a resume as well
    return [warning for line in lines for warning in line.get("warnings", [])]


def _arguments(config: TrainConfig, folder: Path) -> TrainingArguments:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    share, rest = divmod(config.rows_per_step, processes)
    at_a_time = config.rows_per_device or share
    if rest or share % at_a_time:
        raise UserError(
            f"rows_per_step: {config.rows_per_step} do not divide into {processes} "
            f"process(es) of {at_a_time} rows at a time"
        )
    warmup = round(config.warmup_share * config.steps)
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=at_a_time,
        gradient_accumulation_steps=share // at_a_time,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": config.final_lr_share},
        warmup_steps=warmup,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        bf16=config.bf16,
        logging_strategy="steps",
        logging_steps=config.log_every,
        # the Trainer would replace a NaN by the last finite loss, and hide it from the monitor
        logging_nan_inf_filter=False,
        save_strategy="no" if config.save_every is None else "steps",
        save_steps=config.save_every or config.steps,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,  # there are none; the Trainer would search all the same
        use_cpu=not torch.accelerator.is_available(),  # or processes on CPUs do not find each other
        dataloader_num_workers=0,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([torch.as_tensor(item[name]) for item in items]) for name in items[0]}
