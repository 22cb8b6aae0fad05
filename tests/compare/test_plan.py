"""Arms, presets, the output folder: what a comparison accepts and what it refuses."""

import errno
import itertools
import json
import os
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="comparisons need the extra hf")

from diffattn.compare import ComparePlan, get_preset, parse_arms
from diffattn.compare.corpus import open_corpus, prepare_corpus
from diffattn.compare.plan import OutputFolder, said_plainly
from diffattn.compare.run import read_result
from diffattn.compare.sessions import earlier_looks, read_sessions, recorded_session, summary
from diffattn.compare.speed import rates_by_arm, read_rates
from diffattn.compare.start import draw_start
from diffattn.data import load_documents, train_tokenizer
from diffattn.errors import UserError
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM
from diffattn.whole_file import write_json


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
        OutputFolder(out, plan(seeds=4), resume=False)
    (out / "plan.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        OutputFolder(out, plan(), resume=True)


def test_only_the_seeds_of_a_folder_may_grow(tmp_path):
    out = tmp_path / "out"
    OutputFolder(out, plan(), resume=False)
    (out / "runs").mkdir()
    grown = OutputFolder(out, plan(seeds=5), resume=True)
    OutputFolder(out, plan(), resume=True)  # the text may still refuse the other one
    grown.adopt(plan(seeds=5))
    assert json.loads((out / "plan.json").read_text())["seeds"] == 5
    with pytest.raises(UserError, match=r"another comparison \(seeds there is 5, here 3\)"):
        OutputFolder(out, plan(), resume=True)
    other = plan(seeds=6, preset=replace(get_preset("smoke"), tokens=20_000))
    with pytest.raises(UserError, match=r"another comparison \(preset.tokens there is 16000"):
        OutputFolder(out, other, resume=True)
    assert json.loads((out / "plan.json").read_text())["seeds"] == 5


def test_new_words_about_a_preset_do_not_make_another_comparison(tmp_path):
    OutputFolder(tmp_path / "out", plan(), resume=False)
    (tmp_path / "out" / "runs").mkdir()
    reworded = plan(
        preset=replace(get_preset("smoke"), about="x"),
        arms=tuple(replace(arm, about="x") for arm in plan().arms),
    )
    OutputFolder(tmp_path / "out", reworded, resume=True)


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


AGENDA = "\n\n".join(f"Item {i} of the agenda, said {i * 7}. " * 30 for i in range(40))


def plan_of_text(tmp_path, **changes):
    text = tmp_path / "text.txt"
    text.write_text(AGENDA)
    preset = replace(get_preset("smoke"), vocab_size=300, tokens=4000)
    return plan(data=str(text), preset=preset, **changes)


def flip_a_bit(path):
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    path.write_bytes(payload)


def cut(path):
    os.truncate(path, 100)


@pytest.mark.parametrize(
    ("damage", "harm"),
    [
        *itertools.product(
            ("train.bin", "heldout.bin.json", "tokenizer/tokenizer.json"),
            (flip_a_bit, cut, os.unlink),
        ),
        ("facts.json", cut),
        ("facts.json", os.unlink),
    ],
)
def test_damaged_data_is_prepared_again(tmp_path, damage, harm):
    small_plan = plan_of_text(tmp_path)
    before = prepare_corpus(small_plan, tmp_path / "data")
    files = {path: path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()}
    harm(tmp_path / "data" / damage)
    if damage != "facts.json":  # a run opens what was prepared, and must not train on this
        with pytest.raises(UserError, match=r"damaged|cannot read"):
            open_corpus(tmp_path / "data")
    after = prepare_corpus(small_plan, tmp_path / "data")
    assert after.facts == before.facts
    assert {path: path.read_bytes() for path in files} == files


def test_an_intact_folder_is_read_only(tmp_path):
    small_plan = plan_of_text(tmp_path)
    prepare_corpus(small_plan, tmp_path / "data")
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    before = [path.stat().st_mtime_ns for path in files]
    prepare_corpus(small_plan, tmp_path / "data")
    assert [path.stat().st_mtime_ns for path in files] == before


def test_documents_are_counted_with_those_that_were_given(tmp_path):
    facts = prepare_corpus(plan_of_text(tmp_path), tmp_path / "data").facts
    assert facts["documents_train"] < facts["documents_train_given"]
    given = facts["documents_train_given"] + facts["documents_heldout_given"]
    assert given == len(load_documents(tmp_path / "text.txt"))


@pytest.mark.parametrize("damage", [None, "train.bin"])
def test_a_text_that_changed_is_refused(tmp_path, damage):
    small_plan = plan_of_text(tmp_path)
    prepare_corpus(small_plan, tmp_path / "data")
    if damage:
        flip_a_bit(tmp_path / "data" / damage)
    (tmp_path / "text.txt").write_text(AGENDA.replace("Item 7 ", "Item 8 ", 1))
    with pytest.raises(UserError, match=r"^data: .*text\.txt is not the text that .* made from"):
        prepare_corpus(small_plan, tmp_path / "data")


def saved_tokenizer(folder, texts, size=300):
    train_tokenizer(texts, size).save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_that_changed_is_refused(tmp_path):
    texts = AGENDA.split("\n\n")
    folder = saved_tokenizer(tmp_path / "mine", texts)
    with_mine = plan_of_text(tmp_path, tokenizer=folder)
    prepare_corpus(with_mine, tmp_path / "data")
    prepare_corpus(with_mine, tmp_path / "data")
    saved_tokenizer(tmp_path / "mine", ["other words " * 9, *texts], 299)
    refused = r"^tokenizer: .*mine gives other tokens than .* was made with; "
    for damage in (None, "heldout.bin", "train.bin"):
        if damage:
            flip_a_bit(tmp_path / "data" / damage)
        for _ in range(2):  # also when the first try has prepared the text again
            with pytest.raises(UserError, match=refused):
                prepare_corpus(with_mine, tmp_path / "data")
    saved_tokenizer(tmp_path / "mine", texts)
    prepare_corpus(with_mine, tmp_path / "data")


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_tokenizer_without_bos_or_eos_says_what_to_do(tmp_path, name):
    folder = tmp_path / "mine"
    saved_tokenizer(folder, AGENDA.split("\n\n"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    token = settings.pop(name)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with_mine = plan_of_text(tmp_path, tokenizer=str(folder))
    with pytest.raises(UserError, match=rf"^tokenizer: .* has no {name}; name one of") as told:
        prepare_corpus(with_mine, tmp_path / "data")
    assert "=False" not in str(told.value), "an option that the command does not have"
    # and what it says works
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, name: token}))
    assert prepare_corpus(with_mine, tmp_path / "data").bos_id is not None


def test_speed_is_kept_by_seed(tmp_path):
    path, arms = tmp_path / "speed.json", plan().arms
    of_seed = {arm.name: 5.0 + place for place, arm in enumerate(arms)}
    write_json(path, [of_seed, of_seed])
    assert read_rates(plan(seeds=3), path) == [of_seed, of_seed]
    assert read_rates(plan(seeds=1), path) == [of_seed]
    assert rates_by_arm(plan(seeds=2), [of_seed] * 2)["diff-v1"].tolist() == [[6.0], [6.0]]
    others = plan(arms=tuple(parse_arms("transformer,diff-v2")))
    assert read_rates(others, path) == []
    for damaged in ("", "{", "5", "[5]", '[{"transformer": null, "diff-v1": 1}]'):
        path.write_text(damaged)
        assert read_rates(plan(), path) == []


def test_sessions_add_up(tmp_path, monkeypatch):
    path = tmp_path / "sessions.json"
    clock = iter([10.0, 25.0, 100.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))

    def session(seeds, memory):
        return recorded_session(
            path,
            started=5.0,
            seeds=seeds,
            machine={"jobs": seeds},
            peak_memory_bytes=lambda: memory,
        )

    with session(2, 70):
        pass
    with pytest.raises(ZeroDivisionError), session(3, 90):
        raise ZeroDivisionError
    with session(3, 80):
        pass
    sessions = read_sessions(path)
    assert [record["finished"] for record in sessions] == [True, False, True]
    total = summary(sessions)
    assert (total["wall_seconds"], total["peak_memory_bytes"]) == (5.0 + 20.0 + 95.0, 90)
    assert (total["created"], total["machine"]) == (sessions[-1]["ended"], {"jobs": 3})
    assert earlier_looks(sessions, 3) == [2]
    assert earlier_looks(sessions, 2) == []
    assert earlier_looks([{**sessions[0], "seeds": 1}], 3) == [], "one seed decides nothing"
    for damaged in ("", "{", "[1]", "[{}]"):
        path.write_text(damaged)
        assert read_sessions(path) == []
