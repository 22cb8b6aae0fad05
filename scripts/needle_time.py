"""How much longer needle prompts take with all scorers than their bare forward passes.

    python scripts/needle_time.py MODEL --prompts 100 --length 2048

Each prompt is measured in turns: the suite's record, then one forward pass over the same tokens.
"""

import argparse
import time
from pathlib import Path

import torch

from diffattn.data import load_documents
from diffattn.data.needle_prompts import needle_prompts
from diffattn.suites import retrieval
from diffattn.suites.subject import load


def main():
    """Print the ratio of both sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--needles", type=int, default=4)
    parser.add_argument("--queries", type=int, default=2)
    options = parser.parse_args()
    loaded = load(Path(options.model), torch.float32)
    prompts = needle_prompts(
        load_documents(None),
        loaded.tokenizer,
        length=options.length,
        needles=options.needles,
        queries=options.queries,
        depths=(0.5,),
        samples=options.prompts,
    )
    settings = retrieval.Settings(cells=(f"{options.needles}x{options.queries}",))

    def suite(prompt):
        list(retrieval.measure(settings, loaded, [prompt]))

    @torch.no_grad()
    def bare(prompt):
        ids = torch.tensor([prompt.prompt], device=loaded.model.device)
        loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.sum().item()

    for side in (suite, bare):  # the first call of each warms up
        side(prompts[0])
    spent = {suite: 0.0, bare: 0.0}
    for n, prompt in enumerate(prompts):
        for side in (suite, bare) if n % 2 else (bare, suite):
            started = time.perf_counter()
            side(prompt)
            spent[side] += time.perf_counter() - started
    print(
        f"{len(prompts)} prompts of {options.length:,} tokens: suite {spent[suite]:.1f} s, "
        f"bare passes {spent[bare]:.1f} s, ratio {spent[suite] / spent[bare]:.3f}"
    )


if __name__ == "__main__":
    main()
