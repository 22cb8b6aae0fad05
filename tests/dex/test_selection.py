"""Head selection: entropy in blocks, importance by gates, plans."""

import families
import pytest
import tiny
import torch
import torch.nn.functional as F

from diffattn.dex import DexConfig, find_sites, inject, select_heads
from diffattn.dex.plan import HeadPlan, choose, draw, terminal_map
from diffattn.errors import UserError

WITHOUT_ONE_MAP = ["bloom", "falcon", "diffllama", "diffattn v1-gqa", "diffattn v2-gqa"]
WITHOUT_ONE_MAP += ["diffattn grouped", "diffattn gated qk-norm"]
MEASURED = [name for name in families.NAMES if name not in WITHOUT_ONE_MAP]
SEQUENCES = [tiny.tokens(2, 40, seed=seed) for seed in range(2)]


def entropies_of_whole_maps(model, skip, first_key):
    """The same from the maps that eager attention returns."""
    totals = None
    for ids in SEQUENCES:
        with torch.no_grad():
            maps = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
        stacked = torch.stack(maps).double()[..., skip:, :]  # layers, batch, heads, rows, keys
        if not first_key:
            stacked = stacked[..., 1:]
            stacked = stacked / stacked.sum(-1, keepdim=True)
        rows = torch.special.entr(stacked).sum(-1).mean((1, 3))
        totals = rows if totals is None else totals + rows
    return totals / len(SEQUENCES)


@pytest.mark.parametrize("first_key", [True, False])
@pytest.mark.parametrize("name", MEASURED)
def test_entropy_equals_that_of_the_whole_maps(name, first_key, monkeypatch):
    monkeypatch.setattr("diffattn.dex.entropy._ROWS", 7)
    model = families.build(name)
    plan = select_heads(model, SEQUENCES, skip=5, first_key=first_key)
    want = entropies_of_whole_maps(model, 5, first_key)
    torch.testing.assert_close(torch.tensor(plan.scores).double(), want, rtol=1e-4, atol=1e-5)
    for layer, chosen in plan.heads.items():
        top = want[layer].topk(len(chosen)).indices
        assert chosen == sorted(top.tolist())
        assert len(chosen) == want.shape[1] // 2
    assert plan.options["tokens"] == 160
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", WITHOUT_ONE_MAP)
def test_entropy_of_other_attention_is_refused_and_importance_works(name):
    model = families.build(name)
    with pytest.raises(UserError, match="choose importance or all"):
        select_heads(model, SEQUENCES)
    plan = select_heads(model, SEQUENCES, criterion="importance", count=1)
    inject(model, DexConfig(heads=plan.heads, ramp_steps=1))


@pytest.mark.parametrize("name", ["llama", "gpt2", "diffattn v1-gqa"])
def test_importance_is_the_slope_of_the_loss_in_a_gate(name):
    model = families.build(name).double()
    plan = select_heads(model, SEQUENCES[:1], criterion="importance")
    site_heads, width = families.heads(name)
    step, ids = 3e-3, SEQUENCES[0]
    for layer in (0, 1):
        projection = model.get_submodule(find_sites(model)[layer].projection)
        for head in range(site_heads):
            losses = []
            for sign in (1, -1):

                def gate(module, args, sign=sign, head=head):
                    heads = args[0].clone()
                    heads[..., head * width : (head + 1) * width] *= 1 + sign * step
                    return (heads,)

                handle = projection.register_forward_pre_hook(gate)
                with torch.no_grad():
                    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
                losses.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
                handle.remove()
            slope = abs(losses[0] - losses[1]) / (2 * step)
            assert plan.scores[layer][head] == pytest.approx(slope, rel=5e-3, abs=1e-4)
    assert all(p.requires_grad for p in model.parameters())


def test_ties_and_odd_counts():
    assert choose([[1.0, 2.0, 2.0]], None, highest=True) == {0: [1]}
    assert choose([[1.0, 1.0, 0.5]], 2, highest=False) == {0: [0, 2]}
    assert choose([[3.0]], None, highest=True) == {0: [0]}


def test_a_plan_is_written_read_checked_and_drawn(tmp_path):
    model = families.build("llama")
    plan = select_heads(model, SEQUENCES, skip=5)
    plan.save(tmp_path / "plan.json")
    again = HeadPlan.read(tmp_path / "plan.json")
    assert again == plan
    again.check(plan.fingerprint)
    other = select_heads(families.build("gpt2"), criterion="all")
    assert other.heads == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    with pytest.raises(UserError, match="expected one for this model"):
        again.check(other.fingerprint)
    drawn = terminal_map(plan).splitlines()
    assert drawn[0].split() == ["head", "0", "1", "2", "3"]
    assert [line.count("[") for line in drawn[1:-1]] == [2, 2]
    terminal_map(other)
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    for name, chosen in (("one", plan), ("all", other)):
        draw(chosen, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda m, p: select_heads(m, []), "at least one, got none"),
        (lambda m, p: select_heads(m, [tiny.tokens(1, 32)]), "T above 32"),
        (lambda m, p: select_heads(m, SEQUENCES, criterion="luck"), "entropy, importance, all"),
        (lambda m, p: select_heads(m, SEQUENCES, count=5), "1 to 4 heads"),
        (lambda m, p: HeadPlan.read(p / "absent.json"), "cannot be read"),
        (lambda m, p: HeadPlan.read(p / "no.json"), "not a plan of heads"),
    ],
)
def test_refusals(act, says, tmp_path):
    (tmp_path / "no.json").write_text('{"heads": 3}')
    with pytest.raises(UserError, match=says):
        act(families.build("llama"), tmp_path)
