"""Compare greedy tokens of small random models in vLLM with those in transformers.

    python scripts/vllm_greedy.py --out docs/results/vllm_greedy.json

Needs vLLM, in an environment with diffattn installed: vLLM finds the models through the entry
point of the installed package.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks may share a NUMA node
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch

from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM

# widths that vLLM's CPU kernels have; matrices large enough that no two logits are close
BASE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "match_heads": 8,
    "match_key_value_heads": 4,
    "intermediate_size": 256,
    "initializer_range": 0.3,
    "scale_embeddings": False,
    "tie_word_embeddings": False,
}
KINDS = {
    "softmax": {"attention": "softmax"},
    "v1": {"attention": "v1", "match_key_value_heads": 8},
    "v1-gqa": {"attention": "v1"},
    "v1-tied": {"attention": "v1", "scale_embeddings": True, "tie_word_embeddings": True},
    "v1-norms-biases": {"attention": "v1", "qk_norm": True, "attention_bias": True},
    "v1-per-head": {"attention": "v1", "lam_per": "head"},
    "v1-window": {
        "attention": "v1",
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "v2": {"attention": "v2", "match_key_value_heads": 8},
    "v2-gqa": {"attention": "v2"},
    "grouped": {"attention": "grouped"},
    "grouped-latent": {"attention": "grouped_latent"},
    "grouped-latent-per-group": {"attention": "grouped_latent", "lam_per": "group"},
}
PROMPT_LENGTHS = (1, 5, 17, 40, 150)
NEW_TOKENS = 48
ENGINE = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,  # the longest prompt is read in chunks
}


def build(kind: str) -> DiffTransformerForCausalLM:
    """A random model in fp32, with distinct gains and a lam that matters."""
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**{**BASE, **KINDS[kind]})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "subln.weight")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_()
    return model


def prompts() -> list[list[int]]:
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = BASE["vocab_size"]
    return [
        torch.randint(vocabulary, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


@torch.no_grad()
def tokens_of_transformers(model: DiffTransformerForCausalLM) -> tuple[list[list[int]], float]:
    """Greedy tokens of every prompt, and the smallest gap between the two largest logits."""
    found, smallest = [], float("inf")
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found.append(out.sequences[0, len(prompt) :].tolist())
        first, second = torch.cat(out.logits).topk(2).values.unbind(-1)
        smallest = min(smallest, (first - second).min().item())
    return found, smallest


def without_noise(model: DiffTransformerForCausalLM) -> list[list[int]]:
    """Greedy tokens of transformers with lam = 0, for how much the noise map decides."""
    hooks = [
        layer.self_attn.lam.register_forward_hook(lambda module, args, lam: torch.zeros_like(lam))
        for layer in model.model.layers
        if hasattr(layer.self_attn, "lam")
    ]
    found, _ = tokens_of_transformers(model)
    for hook in hooks:
        hook.remove()
    return found


def tokens_of_vllm(folder: Path, **options: Any) -> list[tuple[list[list[int]], list[int]]]:
    """Greedy tokens of every prompt and how many prompt tokens came from the prefix cache, twice.

    The second pass finds the blocks of the first in the cache.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(folder), **{**ENGINE, **options})
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts()]
    passes = []
    for _ in range(2):
        answers = engine.generate(requests, greedy, use_tqdm=False)
        passes.append(
            (
                [list(answer.outputs[0].token_ids) for answer in answers],
                [answer.num_cached_tokens for answer in answers],
            )
        )
    return passes


def equal_tokens(one: list[list[int]], other: list[list[int]]) -> list[int]:
    """Number of equal tokens of each prompt, position by position."""
    return [
        sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(one, other, strict=True)
    ]


def compare(kind: str, *, tensor_parallel: int = 1, compiled: bool = False) -> dict:
    """One kind of model in both; every count is a number of tokens for each prompt."""
    model = build(kind)
    wanted, margin = tokens_of_transformers(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (first, _), (second, cached) = tokens_of_vllm(
            Path(folder), tensor_parallel_size=tensor_parallel, enforce_eager=not compiled
        )
    result = {
        "kind": kind,
        "options": KINDS[kind],
        "tensor_parallel": tensor_parallel,
        "compiled": compiled,
        "equal": equal_tokens(first, wanted),
        "equal_second_pass": equal_tokens(second, wanted),
        "prompt_tokens_from_cache": cached,
        "distinct": [len(set(tokens)) for tokens in wanted],
        "smallest_margin": round(margin, 4),
    }
    if kind != "softmax":
        result["equal_without_noise_map"] = equal_tokens(without_noise(model), wanted)
    return result


def all_equal(result: dict) -> bool:
    """Whether vLLM gave every token that transformers gave, in both passes."""
    counts = {*result["equal"], *result["equal_second_pass"]}
    return counts == {NEW_TOKENS}


def main() -> int:
    """Compare, print a line for each kind, write the results; 1 where a token differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated names")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="number of ranks")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile in vLLM")
    parser.add_argument("--out", type=Path, help="JSON file; runs of other kinds in it stay")
    given = parser.parse_args()
    runs = []
    for kind in given.kinds.split(","):
        result = compare(kind, tensor_parallel=given.tensor_parallel, compiled=given.compiled)
        result |= {
            "all_equal": all_equal(result),
            "date": date.today().isoformat(),
            "command": f"python {shlex.join(sys.argv)}",
        }
        runs.append(result)
        print(f"{kind}: {'all equal' if result['all_equal'] else result['equal']}", flush=True)
        if given.out:
            write(given.out, runs)
    return 0 if all(result["all_equal"] for result in runs) else 1


def write(path: Path, runs: list[dict]) -> None:
    """Write the runs, in place of earlier ones of the same kind and settings."""
    earlier = json.loads(path.read_text())["runs"] if path.exists() else []
    merged = {
        (run["kind"], run["tensor_parallel"], run["compiled"]): run for run in (*earlier, *runs)
    }
    packages = ("diffattn", "torch", "transformers", vllm_distribution())
    report = {
        "what": "greedy tokens in vLLM that equal those in transformers, for each prompt",
        "versions": {name: version(name) for name in packages},
        "platform": "CPU, fp32",
        "prompt_lengths": PROMPT_LENGTHS,
        "new_tokens": NEW_TOKENS,
        "model": BASE,
        "engine": ENGINE,
    }
    # a line for each run
    head = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in report.items())
    lines = ",\n".join(f"  {json.dumps(run)}" for run in merged.values())
    path.write_text(f'{{\n{head},\n "runs": [\n{lines}\n ]\n}}\n')


def vllm_distribution() -> str:
    """Name of the installed package that brings vLLM."""
    from importlib.metadata import packages_distributions

    return packages_distributions()["vllm"][0]


if __name__ == "__main__":
    sys.exit(main())
