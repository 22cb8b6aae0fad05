"""Settings of one training run."""

from dataclasses import dataclass

from diffattn.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """AdamW with warm-up and decay, as the Trainer takes it."""

    steps: int
    """Optimizer steps."""
    rows_per_step: int
    """Items of the stream in one optimizer step, over all processes and accumulation steps."""
    rows_per_device: int | None = None
    """Items that a device takes at a time; None means all of its share at once."""
    learning_rate: float = 2e-3
    """Peak learning rate."""
    warmup_share: float = 0.05
    """Share of the steps that warm up linearly from 0."""
    final_lr_share: float = 0.1
    """Learning rate at the end of the cosine decay, as a share of the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; lambda, norms and biases have none."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm."""
    seed: int = 0
    """Seed of dropout and of everything else that the Trainer draws."""
    log_every: int = 1
    """Steps between two lines of the metrics file."""
    measure_every: int | None = None
    """Steps between two held-out measurements; None means none."""
    save_every: int | None = None
    """Steps between two checkpoints; None means none."""
    bf16: bool = False
    """Whether to compute under bf16 autocast, with fp32 weights."""

    def __post_init__(self) -> None:
        for name in ("steps", "rows_per_step", "log_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("warmup_share", "final_lr_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}: expected a share of 0 to 1, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise UserError(f"learning_rate: expected more than 0, got {self.learning_rate}")
