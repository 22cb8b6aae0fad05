"""Prints how long the suite `retrieval` takes beside the bare forward passes of its prompts."""

import argparse
import statistics
import time
from pathlib import Path

import torch

from diffattn.suites import retrieval
from diffattn.suites.subject import load
from diffattn.suites.text import text_of


def main() -> None:
    """Time both in turns, prompt by prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a causal language model")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=100)
    args = parser.parse_args()
    loaded = load(args.model, torch.float32)
    each = -(-args.prompts // 20)  # four cells, five depths
    settings = retrieval.Settings(lengths=(args.length,), samples=each)
    items = retrieval.items(settings, loaded, text_of(None, []))[
        :: max(1, 20 * each // args.prompts)
    ]
    ratios, bare, whole = [], 0.0, 0.0
    for number, item in enumerate(items[: args.prompts]):
        times = {}
        for side in ("bare", "suite") if number % 2 else ("suite", "bare"):
            started = time.perf_counter()
            if side == "bare":
                with torch.no_grad():
                    loaded.model(input_ids=torch.tensor([item.prompt]), logits_to_keep=1)
            else:
                list(retrieval.measure(settings, loaded, [item]))
            times[side] = time.perf_counter() - started
        bare, whole = bare + times["bare"], whole + times["suite"]
        ratios.append(times["suite"] / times["bare"])
        if number % 10 == 9:
            print(f"{number + 1} prompts: {whole / bare:.3f}", flush=True)
    print(
        f"{len(ratios)} prompts of {args.length:,} tokens: {whole:.1f} s, bare passes {bare:.1f} "
        f"s, ratio {whole / bare:.3f}, median of prompts {statistics.median(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
