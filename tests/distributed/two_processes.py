"""Compares two processes with one; from this folder:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 two_processes.py OUT

The first process writes OUT/found.json and prints the largest differences of logits and gradients.
"""

import json
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

sys.path.append(str(Path(__file__).parent.parent / "models"))

from tiny import model as tiny_model
from tiny import tokens

from diffattn.errors import UserError
from diffattn.models import DiffTransformerForCausalLM
from diffattn.nn import Fp32Module
from diffattn.training import Interrupted, TrainConfig, train

# enough key/value heads for two processes, and fewer of them than query heads
CASES = {
    "softmax": {"kind": "softmax-gqa"},
    "v1": {"kind": "v1-gqa"},
    "v2": {"kind": "v2-gqa"},
    "grouped": {"kind": "grouped", "match_key_value_heads": 4},
    "grouped_latent": {"kind": "v2", "attention": "grouped_latent", "match_key_value_heads": 2},
    "mixed": {"kind": "mixed", "match_key_value_heads": 4, "tie_word_embeddings": False},
    "lam_per_head": {
        "kind": "v1-gqa",
        "lam_per": "head",
        "qk_norm": True,
        "attention_sink": True,
        "attention_softcap": 5.0,
        "output_gate": True,
        "attention_bias": True,
        "attn": "eager",
    },
    "lam_per_group": {
        "kind": "grouped",
        "match_key_value_heads": 4,
        "lam_per": "group",
        "wide_values": False,
        "sliding_window": 5,
    },
    "sigmoid_per_group": {
        "kind": "grouped",
        "match_key_value_heads": 4,
        "lam": "sigmoid",
        "lam_per": "group",
        "hidden_act": "poly_norm",
        "intermediate_size": 90,
    },
}
SETTINGS = TrainConfig(steps=6, rows_per_step=4, learning_rate=1e-2, save_every=2)
CLOSER = ("v1", "mixed")  # tied and untied embeddings


def build(case):
    """The model of a case, the same in every process."""
    options = dict(CASES[case])
    # an even vocabulary, for transformers before 5.24 divides it evenly alone
    model = tiny_model(options.pop("kind"), vocab_size=62, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_()
    return model


def run(model, ids, batches=1):
    """Logits after one backward pass, or after one for each part of the batch."""
    logits = []
    for part in ids.chunk(batches):
        output = model(input_ids=part, labels=part)
        (output.loss / batches).backward()
        logits.append(output.logits.detach())
    return torch.cat(logits)


def gradients(model):
    """Whole gradients by the parameters' names."""
    whole = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole


def differences(logits, grads, expected, expected_grads):
    """The largest difference in any process, and the largest number expected there.

    Of the logits and of each gradient, by the parameter's name.
    """
    pairs = {"logits": (logits, expected)}
    pairs |= {name: (grads[name], grad) for name, grad in expected_grads.items()}
    found = {}
    for name, (here, there) in pairs.items():
        error = there.new_tensor(math.inf) if here is None else (here - there).abs().max()
        found[name] = (error.nan_to_num(nan=math.inf).item(), there.abs().max().item())
    each = [found] * dist.get_world_size()
    dist.all_gather_object(each, found)
    return {name: max(of_one[name] for of_one in each) for name in found}


def wrapped(case, arm):
    """A model under `DistributedDataParallel` or `fully_shard`, and itself without the wrapper."""
    model = build(case)
    if arm == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model, model
    if arm == "ddp, checkpointed":
        model.train().gradient_checkpointing_enable()
    return DistributedDataParallel(model), model


def loaded(folder, **sizes):
    """The model of a case, split by transformers while it is loaded."""
    return DiffTransformerForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(**sizes),
        attn_implementation=CASES[folder.name].get("attn", "sdpa"),
    )


def compare(case, out):
    """Differences of every arm of a case."""
    ids, folder = tokens(batch=4), out / case
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    model = build(case)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    logits = run(model, ids)
    expected, expected_mine = (logits, gradients(model)), (logits[mine], gradients(model))
    found = {}
    for arm in ["ddp", "fsdp2"] + (["ddp, checkpointed"] if case in CLOSER else []):
        model, inner = wrapped(case, arm)
        run(model, ids[mine])
        inner.zero_grad()
        logits = run(model, ids[mine])  # a second pass fails where a parameter went unused
        found[arm] = differences(logits, gradients(inner), *expected_mine)
    if case in CLOSER:
        model = loaded(folder, fsdp_size=2)
        logits = run(model, ids[mine])
        found["fsdp2, loaded"] = differences(logits, gradients(model), *expected_mine)
    model = loaded(folder, tp_size=2)
    logits = run(model, ids)
    found["tp"] = differences(logits, gradients(model), *expected)
    model.zero_grad()
    model.train().gradient_checkpointing_enable()
    logits = run(model, ids, batches=2)
    found["tp, checkpointed, two batches"] = differences(logits, gradients(model), *expected)
    return {f"{case}: {arm}": values for arm, values in found.items()}


@torch.no_grad()
def generate(case, out):
    """Whether split models write the tokens of the whole one, and save its weights."""
    ids, same = tokens(), {}
    expected = build(case).generate(ids, max_new_tokens=6, do_sample=False)
    for arm in ("tp_size", "pp_size"):
        model = loaded(out / case, **{arm: 2})
        written = model.generate(ids, max_new_tokens=6, do_sample=False)
        same[f"{case}: {arm} generates"] = torch.equal(written, expected)
        if arm == "tp_size":
            model.save_pretrained(out / f"{case} again")
            dist.barrier()
            old, new = (
                load_file(out / name / "model.safetensors") for name in (case, f"{case} again")
            )
            same[f"{case}: {arm} saves"] = all(torch.equal(old[name], new[name]) for name in old)
    return same


def refusal(out):
    """What loading a model with one key/value head says; the file of its weights holds none."""
    folder = out / "one group"
    model = build("v1")
    model.config.update({"match_key_value_heads": 2, "dtype": "float32"})
    model.config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    dist.barrier()
    try:
        DiffTransformerForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_size=2)
        )
    except UserError as error:
        return str(error)
    return "nothing"


def precision(out):
    """Dtypes of lambda's vectors in the forward pass of sharded bf16 models, or what refuses."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def loaded_in_bf16():
        return DiffTransformerForCausalLM.from_pretrained(
            out / "v1", dtype=torch.bfloat16, distributed_config=DistributedConfig(fsdp_size=2)
        )

    def under_a_policy():
        model = build("v1")
        for module in model.modules():
            if isinstance(module, Fp32Module):
                fully_shard(module)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model

    seen = {}
    for make in (loaded_in_bf16, under_a_policy):
        try:
            model = make()
            lam = model.model.layers[0].self_attn.lam
            dtypes = []
            lam.register_forward_hook(lambda module, *_: dtypes.append(module.lambda_q1.dtype))  # noqa: B023
            logits = run(model, tokens())
            seen[make.__name__] = [str(logits.dtype), *{str(dtype) for dtype in dtypes}]
        except AssertionError as error:
            seen[make.__name__] = str(error)
    return seen


class Rows:
    """Random rows of tokens, in the order of training."""

    def __len__(self):
        return SETTINGS.steps * SETTINGS.rows_per_step

    def __getitem__(self, index):
        row = tokens(batch=1, seed=index).numpy()
        return {"input_ids": row, "labels": row}

    def kind(self, step):
        return "text"


def train_and_resume(out):
    """Trains straight, then until one process is asked to stop, then on; leaves the weights."""
    straight, resumed = build("v1"), build("v1")
    train(straight, Rows(), SETTINGS, out / "straight")
    calls = iter(range(1, 7))
    try:
        train(
            build("v1"),
            Rows(),
            SETTINGS,
            out / "stopped",
            should_stop=lambda: next(calls) == 3 and dist.get_rank() == 1,
        )
    except Interrupted:
        outcome = "resumed"
    else:
        outcome = "never stopped"
    torch.nn.init.zeros_(resumed.model.embed_tokens.weight)  # comes back from the checkpoint
    try:
        train(resumed, Rows(), SETTINGS, out / "stopped")
    except RuntimeError as error:
        if "tagged with cpu:0" not in str(error):
            raise
        outcome = "transformers cannot resume processes on CPUs"
    if dist.get_rank() == 0:
        straight.save_pretrained(out / "straight")
        resumed.save_pretrained(out / "stopped")
    return outcome


def share_of_large(error, size):
    """A difference, as a share of the largest expected number where that is above 1."""
    return error / max(1.0, size)


def main(out):
    """Compare everything; the first process writes what it found."""
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    found, same = {}, {}
    for case in CASES:
        found |= compare(case, out)
    for case in CLOSER:
        same |= generate(case, out)
    result = {"differences": found, "same": same, "refusal": refusal(out)}
    result["precision"] = precision(out)
    result["training"] = train_and_resume(out)
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(result, indent=1))
        print(f"{'':48}  logits  gradients  lambda's, of their own size")
        for name, values in found.items():
            logits, *grads = (share_of_large(*value) for value in values.values())
            own = [error / size for key, (error, size) in values.items() if "lambda" in key]
            print(f"{name:48} {logits:.1e}    {max(grads):.1e}  {max(own, default=0):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
