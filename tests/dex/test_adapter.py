"""The extension in a model: identity, schedule, selection, merging, files."""

import subprocess
import sys

import families
import pytest
import tiny
import torch
from transformers import T5Config, T5ForConditionalGeneration

from diffattn.dex import (
    DexConfig,
    disable,
    find_sites,
    inject,
    load,
    merge,
    save,
    set_step,
    unload,
    unmerge,
)
from diffattn.dex.adapter import adapter_of
from diffattn.dex.schedule import schedule_shares
from diffattn.errors import UserError

IDS = tiny.tokens(2, 12)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def train(model, steps=3, rate=1e-2):
    """A few steps of which the last leaves lam, W_D and the projections away from their start."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    model.train()
    for step in range(steps):
        set_step(model, step + 1)
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    return model.eval()


def dexed(name="llama", **options):
    return inject(families.build(name), DexConfig(**{"ramp_steps": 4, **options}))


def test_values_of_the_schedule():
    def lam(step, learned=0.5):
        fixed, share = schedule_shares(step, start=0.2, ramp_steps=10)
        return fixed + share * learned

    assert lam(0) == 0.0
    assert lam(5) == pytest.approx(0.30)
    assert lam(10) == lam(20) == 0.5
    assert schedule_shares(0, start=0.2, ramp_steps=0) == (0.0, 1.0)
    assert DexConfig(ramp_steps=1).start(0) == pytest.approx(0.2)


@pytest.mark.parametrize("name", families.NAMES)
def test_a_start_at_lam_zero_leaves_the_logits_bitwise(name):
    model = families.build(name)
    before = logits(model)
    inject(model, DexConfig(ramp_steps=4))
    assert torch.equal(logits(model), before)
    set_step(model, 2)
    assert not torch.allclose(logits(model), before, atol=1e-4)


@pytest.mark.parametrize("name", families.NAMES)
def test_merged_logits_are_those_of_the_extension(name):
    """Acceptance case 17, for every family: after training, within 1e-5."""
    model = train(dexed(name, heads={0: [0], 1: [1]}))
    want = logits(model)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    merge(model)
    assert not any(".dex." in name for name, _ in model.named_parameters())
    got = logits(model)
    assert (got - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())
    once = {n: p.detach().clone() for n, p in model.named_parameters()}
    merge(model)
    assert all(torch.equal(p, once[n]) for n, p in model.named_parameters())
    unmerge(model)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize("name", families.NAMES)
def test_what_trains_and_what_does_not(name):
    model = families.build(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sites = find_sites(model)
    train(inject(model, DexConfig(ramp_steps=4)))
    after = dict(model.named_parameters())
    moved = {n for n in before if not torch.equal(after[n], before[n])}
    for site in sites:
        assert f"{site.projection}.weight" in moved
        for module, rows in site.keys_values.items():
            weight = f"{module}.weight"
            assert weight in moved
            if rows is not None:
                change = (after[weight] != before[weight]).any(0 if site.transposed else 1)
                assert torch.equal(change, rows)
    allowed = {m for site in sites for m in (site.projection, *site.keys_values)}
    assert {n.rpartition(".")[0] for n in moved} <= allowed
    for name, parameter in model.named_parameters():
        assert parameter.dim() > 0, name


@pytest.mark.parametrize("name", ["phi3", "gpt2", "gpt_neox"])
def test_queries_of_a_fused_projection_stay_after_unmerging_too(name):
    model = dexed(name)
    merge(model)
    unmerge(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model)
    for site in adapter_of(model).sites:
        ((module, rows),) = site.keys_values.items()
        weight = f"{module}.weight"
        moved = model.get_parameter(weight) != before[weight]
        assert torch.equal(moved.any(0 if site.transposed else 1), rows)


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3", "diffattn v1-gqa"])
def test_unselected_heads_stay_bit_identical(name):
    model = dexed(name, heads={0: [1]})
    set_step(model, 2)
    site, seen = adapter_of(model).sites[0], {}
    extension = adapter_of(model).parts[0]
    extension.register_forward_hook(lambda m, args, out: seen.update(x=args[0], y=out))
    logits(model)
    x, y = (seen[k].unflatten(-1, (site.num_heads, site.value_dim)) for k in "xy")
    others = [head for head in range(site.num_heads) if head != 1]
    assert torch.equal(x[..., others, :], y[..., others, :])
    assert (x[..., 1, :] - y[..., 1, :]).abs().max() > 1e-3
    assert list(adapter_of(model).parts) == [0]
    assert extension.weight.shape[0] == 1


@pytest.mark.parametrize("per_head", [False, True])
def test_minus_equals_plus_with_the_opposite_matrix(per_head):
    options = {"heads": {0: [0, 2], 1: [1, 3]}, "per_head": per_head}
    minus, plus = dexed(**options), dexed(sign=1, **options)
    for layer, extension in adapter_of(minus).parts.items():
        other = adapter_of(plus).parts[layer]
        assert extension.weight.shape[0] == (2 if per_head else 1)
        with torch.no_grad():
            other.weight.copy_(-extension.weight)
    for model in (minus, plus):
        set_step(model, 2)
    assert torch.equal(logits(minus), logits(plus))


def test_both_matrix_and_lam_get_gradients_midway():
    model = dexed()
    set_step(model, 2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    for extension in adapter_of(model).parts.values():
        assert extension.weight.grad.abs().max() > 0
        assert extension.lambda_learn.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_disable_and_unload_give_the_base_back_bitwise(name):
    model = families.build(name)
    base, weights = logits(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    trained = logits(train(inject(model, DexConfig(ramp_steps=4))))
    assert not torch.equal(trained, base)
    with disable(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), trained)
    for again in (False, True):
        if again:
            merge(train(inject(model, DexConfig(ramp_steps=4))))
        unload(model)
        assert torch.equal(logits(model), base)
        assert {n for n, _ in model.named_parameters()} == set(weights)
        assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
        assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "diffattn v1-gqa"])
def test_a_saved_adapter_gives_the_same_logits(name, tmp_path):
    model = train(dexed(name, heads={0: [1], 1: [0]}))
    save(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "dex_config.json",
        "dex_model.safetensors",
    }
    again = load(families.build(name), tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert adapter_of(again).step == 3
    assert not any(p.requires_grad for p in again.parameters())


PLAIN = """
import sys
sys.modules["diffattn"] = None  # as if it were not installed
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.load(sys.argv[2], weights_only=True)
torch.save(model(input_ids=ids, use_cache=False).logits.detach(), sys.argv[3])
"""


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_merged_checkpoint_needs_no_code_of_ours(name, tmp_path):
    model = train(dexed(name))
    want = logits(model)
    merge(model).save_pretrained(tmp_path / "merged")
    torch.save(IDS, tmp_path / "ids.pt")
    run = [
        sys.executable,
        "-c",
        PLAIN,
        *(str(tmp_path / n) for n in ("merged", "ids.pt", "out.pt")),
    ]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_model_with_dex_refuses_to_be_saved_whole(tmp_path):
    model = dexed()
    with pytest.raises(UserError, match="as if it were merged"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    merge(model).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not merged"):
        save(model, tmp_path / "adapter")


def broken(tmp_path, what):
    save(dexed(), tmp_path)
    path = tmp_path / "dex_model.safetensors"
    if what == "flipped byte":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif what == "absent":
        path.unlink()
    elif what == "no JSON":
        (tmp_path / "dex_config.json").write_text("{")
    elif what == "other JSON":
        (tmp_path / "dex_config.json").write_text("[]")


@pytest.mark.parametrize("what", ["flipped byte", "cut", "absent", "no JSON", "other JSON"])
def test_damaged_adapters_are_refused_and_the_model_is_untouched(what, tmp_path):
    broken(tmp_path, what)
    model = families.build("llama")
    with pytest.raises(UserError, match=r"^adapter: "):
        load(model, tmp_path)
    inject(model, DexConfig(ramp_steps=1))


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda f: load(families.build("llama", num_hidden_layers=3), f), "expected the base"),
        (lambda f: load(families.build("qwen2"), f), "expected the base"),
        (lambda f: load(families.build("llama"), f / "nowhere"), "expected a folder with"),
        (lambda f: inject(dexed(), DexConfig(ramp_steps=1)), "already injected"),
        (lambda f: dexed(heads={5: [0]}), "layers 0 to 1, got 5"),
        (lambda f: dexed(heads={0: [4]}), "from 0 to 3 in layer 0"),
        (lambda f: dexed(heads={0: [1, 1]}), "different heads"),
        (lambda f: dexed(heads={}), "at least one selected head"),
        (lambda f: dexed(ramp_steps=0, init_std=0.0), "would never train"),
        (lambda f: dexed(ramp_steps=-1), "count from 0"),
        (lambda f: dexed(lam="on"), "scheduled, pinned"),
        (lambda f: inject(families.build("llama").bfloat16(), DexConfig(ramp_steps=1)), "fp32"),
        (lambda f: merge(families.build("llama")), "DEX injected"),
        (lambda f: unmerge(dexed()), "expected a merged one"),
        (lambda f: inject(torch.nn.Linear(2, 2), DexConfig(ramp_steps=1)), "causal language model"),
    ],
)
def test_refusals(act, says, tmp_path):
    save(dexed(), tmp_path)
    with pytest.raises(UserError, match=says):
        act(tmp_path)


@pytest.mark.parametrize("name", families.NAMES)
def test_sites_of_every_family(name):
    model = families.build(name)
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    sites = find_sites(model)
    assert [site.layer for site in sites] == list(range(len(sites)))
    for site in sites:
        width = model.get_submodule(site.projection).weight.shape[0 if site.transposed else 1]
        assert site.num_heads * site.value_dim == width
        assert (site.num_heads, site.value_dim) == families.heads(name)
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", list(families.REFUSED))
def test_models_without_attention_in_every_layer_are_refused_with_a_list(kind):
    with pytest.raises(UserError, match=families.REFUSED[kind][1]):
        find_sites(families.build_refused(kind))


def test_other_models_are_refused():
    config = T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(UserError, match="expected a decoder"):
        find_sites(T5ForConditionalGeneration(config))
    with torch.device("meta"):
        model = families.build("llama")
    with pytest.raises(UserError, match="weights on a device"):
        find_sites(model)
