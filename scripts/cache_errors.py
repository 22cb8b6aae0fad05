"""How far cached steps are from one full pass, by kind of attention and of cache.

PYTHONPATH=src:tests/models python scripts/cache_errors.py
"""

import importlib.util

import tiny
import torch
from transformers import QuantizedCache

STEPS = (7, *(1,) * 25)
QUANTISED = {
    "fp8": (None, {"backend": "fp8"}),
    "hqq 8": ("hqq", {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1}),
    "hqq 4": ("hqq", {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1}),
    "quanto 4": ("optimum", {"backend": "quanto", "nbits": 4}),
}
GROUPS = {"q_group_size": 16, "residual_length": 8}


@torch.no_grad()
def errors(model, ids, cache=None):
    """Largest and root mean square error of cached logits, in units of the logits' spread."""
    full = model(ids, use_cache=False).logits.float()
    error = (tiny.cached_logits(model, ids, STEPS, cache).float() - full) / full.std()
    return error.abs().max().item(), error.square().mean().sqrt().item()


def main():
    """Print one row for each kind."""
    torch.set_num_threads(1)
    ids = tiny.tokens(2, 32)
    forms = {
        name: {**options, **(GROUPS if package else {})}
        for name, (package, options) in QUANTISED.items()
        if package is None or importlib.util.find_spec(package)
    }
    print("| attention | fp32, largest | bf16, largest | " + " | ".join(forms) + " |")
    print("|---" * (3 + len(forms)) + "|")
    for kind in ("softmax", "v1", "v2", "grouped", "grouped_latent", "gated qk-norm"):
        cells = [f"{errors(tiny.model(kind), ids)[0]:.1e}"]
        cells.append(f"{errors(tiny.model(kind).bfloat16(), ids)[0]:.1%}")
        for options in forms.values():
            model = tiny.model(kind)
            cache = QuantizedCache(config=model.config, **options)
            cells.append(f"{errors(model, ids, cache)[1]:.1%}")
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
