"""Arms, presets, the output folder: what a comparison accepts and what it refuses."""

import errno
import json
import os

import pytest

pytest.importorskip("transformers", reason="comparisons need the extra hf")

from diffattn.compare import ComparePlan, get_preset, parse_arms
from diffattn.compare.corpus import prepare_corpus
from diffattn.compare.plan import OutputFolder, said_plainly, write_json
from diffattn.compare.run import read_result
from diffattn.compare.start import draw_start
from diffattn.errors import UserError
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM


def plan(**changes):
    settings = {
        "arms": tuple(parse_arms("transformer,diff-v1")),
        "seeds": 3,
        "preset": get_preset("smoke"),
        "data": None,
    }
    return ComparePlan(**settings | changes)


def test_an_arm_named_twice_starts_anew():
    arms = parse_arms("transformer, v1,transformer,transformer")
    assert [arm.name for arm in arms] == [
        "transformer",
        "diff-v1",
        "transformer#2",
        "transformer#3",
    ]
    assert [arm.own_start for arm in arms] == [False, False, True, True]


def test_an_arm_may_scale_its_learning_rate():
    plain, slow = parse_arms("transformer,transformer:lr=0.1")
    assert (plain.lr_factor, slow.lr_factor) == (1.0, 0.1)
    assert not slow.own_start


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transformer,diff-v3", "did you mean diff-v"),
        ("transfomer,v1", "did you mean transformer"),
        ("transformer", "expected at least two"),
        ("transformer,", "expected one of"),
        ("transformer,v1:lr=fast", "a factor above 0"),
        ("transformer,v1:lr=-1", "a factor above 0"),
        ("transformer,v1:depth=3", "expected v1:lr=FACTOR"),
    ],
)
def test_bad_arms(text, message):
    with pytest.raises(UserError, match=message) as error:
        parse_arms(text)
    assert str(error.value).startswith("arms: ")
    assert "\n" not in str(error.value)


def test_an_unknown_preset_suggests_a_near_one():
    with pytest.raises(UserError, match=r"preset: .*got 'quik'; did you mean quick\?"):
        get_preset("quik")


@pytest.mark.parametrize("name", ["smoke", "quick", "laptop", "gpu"])
def test_presets_are_consistent(name):
    preset = get_preset(name)
    stages = plan(preset=preset).recall_stages
    total = sum(steps for steps, _ in stages)
    assert total == int(plan(preset=preset).training_steps * preset.recall_share)
    assert [length for _, length in stages] == sorted({length for _, length in stages})
    assert stages[-1][1] == preset.length
    assert all(preset.length % length == 0 for _, length in stages)
    assert max(needles for needles, _ in preset.recall_cells) <= preset.recall_classes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "seeds: expected at least 1, got 0"),
        ({"tokens": 5}, r"tokens: expected at least 2,048 .*, got 5"),
    ],
)
def test_bad_sizes(changes, message):
    from dataclasses import replace

    if "tokens" in changes:
        changes = {"preset": replace(get_preset("smoke"), tokens=changes["tokens"])}
    with pytest.raises(UserError, match=message):
        plan(**changes)


def test_a_folder_belongs_to_one_comparison(tmp_path):
    out = tmp_path / "out"
    OutputFolder(out, plan(), resume=False)
    OutputFolder(out, plan(), resume=True)
    (out / "runs").mkdir()
    with pytest.raises(UserError, match="already holds this comparison; add --resume"):
        OutputFolder(out, plan(), resume=False)
    with pytest.raises(UserError, match=r"another comparison \(seeds there is 3, here 4\)"):
        OutputFolder(out, plan(seeds=4), resume=True)
    (out / "plan.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        OutputFolder(out, plan(), resume=True)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds other files"):
        OutputFolder(tmp_path, plan(), resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_place_that_cannot_be_written(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(UserError, match=r"^out: cannot write .*file"):
        OutputFolder(blocker / "inside", plan(), resume=False)
    with pytest.raises(UserError, match=r"^out: cannot write .*file"):
        OutputFolder(blocker, plan(), resume=False)


def test_two_commands_do_not_share_a_folder(tmp_path):
    first = OutputFolder(tmp_path / "out", plan(), resume=False)
    second = OutputFolder(tmp_path / "out", plan(), resume=True)
    refused = pytest.raises(UserError, match="another command is working")
    with first.locked(), refused, second.locked():
        pass
    # not even the plan is touched, though nothing has been made yet
    before = (tmp_path / "out" / "plan.json").read_text()
    with first.locked(), pytest.raises(UserError, match="another command is working"):
        OutputFolder(tmp_path / "out", plan(seeds=5), resume=False)
    assert (tmp_path / "out" / "plan.json").read_text() == before
    with second.locked():
        pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "x.bin"),
        RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed writing"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path, error):
    with (
        pytest.raises(UserError, match=r"cannot write .*[Nn]o space left") as told,
        said_plainly(tmp_path),
    ):
        raise error
    assert "\n" not in str(told.value)


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(ZeroDivisionError), said_plainly(tmp_path):
        raise ZeroDivisionError


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_json(path, {"finished": 1})

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"finished": 2})
    assert json.loads(path.read_text()) == {"finished": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def small(kind):
    config = DiffTransformerConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, match_heads=4, attention=kind
    )
    return DiffTransformerForCausalLM(config)


def test_arms_share_every_tensor_whose_name_and_shape_agree():
    models = {kind: small(kind) for kind in ("softmax", "v1", "v2", "grouped")}
    for model in models.values():
        draw_start(model, 7)
    base = dict(models["softmax"].named_parameters())
    shared = {
        kind: {
            name
            for name, parameter in model.named_parameters()
            if name in base and base[name].shape == parameter.shape
        }
        for kind, model in models.items()
    }
    for kind, names in shared.items():
        for name in names:
            assert dict(models[kind].named_parameters())[name].equal(base[name]), (kind, name)
    assert "model.layers.1.self_attn.q_proj.weight" in shared["v1"]
    assert "model.layers.1.self_attn.q_proj.weight" not in shared["v2"]
    assert "model.layers.1.self_attn.o_proj.weight" in shared["v2"]


def test_starts_differ_by_seed_and_layer():
    first, second = small("v1"), small("v1")
    draw_start(first, 0)
    draw_start(second, 1)
    for name, parameter in first.named_parameters():
        if "norm" not in name and "subln" not in name:
            assert not parameter.equal(dict(second.named_parameters())[name]), name
    a, b = (layer.self_attn.q_proj.weight for layer in first.model.layers)
    assert not a.equal(b)
    std = first.model.embed_tokens.weight.std().item()
    assert std == pytest.approx(0.5 * 32**-0.5, rel=0.1)


def test_a_killed_start_does_not_block_the_folder(tmp_path):
    (tmp_path / ".plan.json.123.draft").write_text("{")
    (tmp_path / ".lock").write_text("")
    OutputFolder(tmp_path, plan(), resume=False)


def test_a_text_that_was_refused_frees_the_folder(tmp_path):
    OutputFolder(tmp_path / "out", plan(data="/nothing"), resume=False)
    OutputFolder(tmp_path / "out", plan(), resume=False)
    (tmp_path / "out" / "runs").mkdir()
    with pytest.raises(UserError, match="already holds this comparison"):
        OutputFolder(tmp_path / "out", plan(), resume=False)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"arm": "diff-v1"}'])
def test_a_damaged_result_counts_as_not_finished(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("damage", ["facts.json", "train.bin", "heldout.bin.json"])
def test_damaged_data_is_prepared_again(tmp_path, damage):
    from dataclasses import replace

    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Item {i} of the agenda, said {i * 7}. " * 30 for i in range(40)))
    small_plan = plan(
        data=str(text), preset=replace(get_preset("smoke"), vocab_size=300, tokens=4000)
    )
    before = prepare_corpus(small_plan, tmp_path / "data")
    path = tmp_path / "data" / damage
    path.write_bytes(path.read_bytes()[:-20])
    after = prepare_corpus(small_plan, tmp_path / "data")
    assert after.facts == before.facts
