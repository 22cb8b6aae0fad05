"""Trains a small model with DEX; alone, or from this folder in two processes:

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 trained.py OUT
"""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "models"))

import families

from diffattn.dex import DexCallback, DexConfig, inject, save
from diffattn.training import TrainConfig, train
from diffattn.training.adaptation import DexTrainer

SETTINGS = TrainConfig(steps=6, rows_per_step=4, learning_rate=1e-2, save_every=4)


class Rows:
    """Sequences of equal length, drawn from their index."""

    def __len__(self):
        return SETTINGS.steps * SETTINGS.rows_per_step

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 61, (1, 16), generator=generator).numpy()
        return {"input_ids": ids, "labels": ids.copy()}

    def kind(self, step):
        return "text"


def run(folder):
    """Train and save; a fused model, so that the masks of gradients are under test too."""
    model = inject(families.build("gpt_neox"), DexConfig(ramp_steps=4))
    make = functools.partial(DexTrainer, lam_rate=10.0)
    train(model, Rows(), SETTINGS, folder, trainer_class=make, callbacks=[DexCallback()])
    return model


if __name__ == "__main__":
    out = Path(sys.argv[1])
    trained = run(out / "run")
    if dist.get_rank() == 0:
        save(trained, out / "adapter")
    dist.barrier()
    dist.destroy_process_group()
