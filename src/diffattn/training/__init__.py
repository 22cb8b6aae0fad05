"""Training of language models: a subclass of the Hugging Face Trainer with its callbacks."""

from diffattn.training.checkpoints import latest_checkpoint
from diffattn.training.config import TrainConfig
from diffattn.training.metrics import MetricsLog, read_metrics
from diffattn.training.monitor import DivergedError, SpikeMonitor
from diffattn.training.optimizer import parameter_groups
from diffattn.training.trainer import DiffTrainer, Interrupted, train

__all__ = [
    "DiffTrainer",
    "DivergedError",
    "Interrupted",
    "MetricsLog",
    "SpikeMonitor",
    "TrainConfig",
    "latest_checkpoint",
    "parameter_groups",
    "read_metrics",
    "train",
]
