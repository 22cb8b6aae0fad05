"""How much longer a training step of DEX takes than one of attention-only tuning.

    python scripts/dex_step_time.py MODEL --length 512 --pairs 10

Both models are trained in turns, a step of each; the figure is the median of the pairs' ratios.
Merged inference is timed against the base in the same way.
"""

import argparse

import numpy as np
import torch

from diffattn.dex import DexConfig, inject, merge, set_step
from diffattn.dex.base import load_base
from diffattn.evaluation import take_turns


def main():
    """Print ratios with their quartiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    ids = torch.randint(100, 40_000, (1, options.length))
    models = {}
    for name in ("attention", "all"):
        model = load_base(options.model)
        layers = model.config.num_hidden_layers
        half = model.config.num_attention_heads // 2
        heads = {layer: list(range(half)) for layer in range(layers)}
        models[name] = inject(model, DexConfig(heads=heads, ramp_steps=10, trains=name)).train()
        set_step(models[name], 5)
    optimizers = {
        name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
        for name, model in models.items()
    }

    def step(name):
        models[name](input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    show(
        "training step, DEX / attention-only",
        options.pairs,
        lambda: step("all"),
        lambda: step("attention"),
    )
    merged, base = merge(models.pop("all")).eval(), load_base(options.model)

    def forward(model):
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    show(
        "forward pass, merged / base", options.pairs, lambda: forward(merged), lambda: forward(base)
    )


def show(what, pairs, first, second):
    """Time both in turns and print the ratio."""
    a, b = take_turns([first, second], rounds=pairs)
    low, middle, high = np.quantile(a / b, [0.25, 0.5, 0.75])
    print(f"{what}: {middle:.3f} [{low:.3f}, {high:.3f}], {np.median(b):.2f} s each")


if __name__ == "__main__":
    main()
