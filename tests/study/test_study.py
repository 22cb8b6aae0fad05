"""`diffattn dex study`: arms on the same tokens, what each adds, and what stops it."""

import json
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

pytest.importorskip("peft", reason="the arm lora needs the extra peft")
import families

from diffattn.cli import main
from diffattn.study.arms import ARMS
from diffattn.study.ready import make_ready, trained_parameters
from diffattn.study.results import collect
from diffattn.study.settings import StudySettings
from diffattn.study.tasks import rate_of, tasks_of

SMALL = ("--steps", "4", "--length", "48", "--rates", "1", "--heldout-windows", "3")
SMALL += ("--outside-windows", "2", "--items", "2", "--context", "4000", "--seeds", "2")
TRAINED = [arm.name for arm in ARMS if arm.rate is not None]


def command(base, out, *more):
    arguments = ["dex", "study", str(base / "model"), "--data", str(base / "text.jsonl")]
    return [*arguments, "--out", str(out), *SMALL, *more]


@pytest.fixture(scope="module")
def studied(base, tmp_path_factory):
    """A study of all arms."""
    out = tmp_path_factory.mktemp("study") / "out"
    assert main(command(base, out)) == 0
    return out


def record(studied, name):
    return json.loads((studied / "runs" / f"{name}.json").read_text())


def test_every_arm_is_measured_on_the_same_items(studied):
    results = json.loads((studied / "results.json").read_text())
    assert [arm["name"] for arm in results["arms"]] == [arm.name for arm in ARMS]
    assert results["runs_done"] == len(ARMS) + 2
    for arm in ARMS:
        found = record(studied, f"{arm.name}-0")
        assert [len(v) for v in found["measures"].values()] == [3, 2, 2, 2, 2, 2]
        assert len(found["heads"]["map_distance"]) == 2
    assert {arm["name"]: arm["seeds"] for arm in results["arms"]}["dex"] == [0, 1]


def test_training_lowers_the_loss_of_every_arm_with_enough_to_train(studied):
    base = np.mean(record(studied, "base-0")["measures"]["heldout_loss"])
    for name in TRAINED:
        if name != "pinned":  # starts elsewhere
            assert np.mean(record(studied, f"{name}-0")["measures"]["heldout_loss"]) < base


def test_the_retrofit_starts_exactly_and_moves(studied, base):
    """Its first steps have lam 1/2, and its own parameters alone train."""
    trajectory = record(studied, "retrofit-0")["trajectory"]
    assert trajectory[0]["step"] == 0
    assert trajectory[0]["lam"] == [0.5, 0.5]
    assert trajectory[-1]["lam"] != [0.5, 0.5]


def test_lam_and_the_correction_are_recorded_by_layer(studied):
    dex, pinned = record(studied, "dex-0")["trajectory"], record(studied, "pinned-0")["trajectory"]
    assert [entry["step"] for entry in dex] == [0, 1, 2, 3]
    assert dex[0]["lam"] == dex[0]["ratio"] == [0.0, 0.0]
    # T = 2: at t = 1 half of it has passed, so 1/4 of lambda_init and half of what was learned
    assert dex[1]["lam"] == pytest.approx([0.05, 0.0889], abs=2e-3)
    assert all(ratio > 0 for ratio in dex[1]["ratio"])
    assert pinned[0]["lam"] == pytest.approx([0.2, 0.3555], abs=1e-4)
    assert not record(studied, "attention-0")["trajectory"]


def test_the_noise_floor_is_small_but_its_arithmetic_is_another(studied):
    floor, control = record(studied, "floor-0"), record(studied, "attention-0")
    gap = np.abs(np.subtract(*(r["measures"]["heldout_loss"] for r in (floor, control))))
    assert gap.max() < 1e-3
    assert floor["rate"] == control["rate"]


def test_the_claim_is_dex_minus_attention_on_common_seeds(studied):
    results = json.loads((studied / "results.json").read_text())
    claim = results["claim"]["heldout_loss"]
    pairs = [
        np.subtract(*(record(studied, f"{n}-{s}")["measures"]["heldout_loss"] for n in names))
        for s in (0, 1)
        if (names := ("dex", "attention"))
    ]
    assert claim["difference"] == pytest.approx(np.mean(pairs))
    assert claim["seeds"] == 2
    low, high = claim["interval"]
    assert low < claim["difference"] < high
    lora = results["differences"]["lora"]["heldout_loss"]
    assert (lora["over"], claim["over"]) == ("3 items of one seed", "2 seeds, 3 items")
    assert lora["verdict"] == "one seed"
    assert results["floor"]["heldout_loss"] >= 0


def test_page_and_card_say_it(studied):
    page, card = (studied / "report.html").read_text(), (studied / "claim.md").read_text()
    for arm in ARMS:
        assert arm.title in page
    rows = re.findall(r'<th scope="row">([^<]*)<small>', page)
    assert rows[:2] == ["attention only", "base model"]  # the control comes first
    assert page.count("<svg") == 4
    assert "http" not in re.sub(r"http://www\.w3\.org/[^\"]*", "", page)
    assert not re.search(r"\b(nan|None|inf)\b", re.sub(r"<[^>]*>", "", page.split("Machine 1")[0]))
    assert "held-out loss (nats per token)" in card
    assert (
        f"diffattn dex study {json.loads((studied / 'settings.json').read_text())['model']}" in card
    )


def test_a_finished_study_only_writes_again(base, studied, capsys):
    before = {path: path.stat().st_mtime_ns for path in (studied / "runs").iterdir()}
    assert main(command(base, studied)) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(command(base, studied, "--resume")) == 0
    assert {path: path.stat().st_mtime_ns for path in (studied / "runs").iterdir()} == before
    shown = capsys.readouterr().out
    assert "attention only" in shown
    assert "claim.md" in shown


def test_a_study_goes_on_where_runs_are_missing_even_without_its_work(base, studied, tmp_path):
    """What was committed is enough: the runs that are there stay, the others are made alike."""
    out = tmp_path / "out"
    shutil.copytree(studied, out)
    shutil.rmtree(out / "work")
    lost = record(studied, "dex-1")
    (out / "runs" / "dex-1.json").unlink()
    assert main(command(base, out, "--resume")) == 0
    again = record(out, "dex-1")
    assert again["measures"]["heldout_loss"] == pytest.approx(lost["measures"]["heldout_loss"])
    for mine, theirs in zip(again["trajectory"], lost["trajectory"], strict=True):
        assert mine["ratio"] == pytest.approx(theirs["ratio"], rel=1e-4)


def test_a_killed_study_loses_no_finished_run(base, tmp_path):
    out = tmp_path / "out"
    arms = ("--arms", "base,attention,dex", "--seeds", "1", "--steps", "40")
    run = [sys.executable, "-m", "diffattn", *command(base, out, *arms)]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (out / "runs" / "attention-0.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    kept = record(out, "attention-0")
    assert main(command(base, out, *arms, "--resume")) == 0
    assert record(out, "attention-0") == kept
    assert record(out, "dex-0")["measures"]


def test_two_processes_share_the_runs(base, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    arms = ("--arms", "base,attention,dex,extension,plus", "--resume")
    run = [sys.executable, "-m", "diffattn", *command(base, out, *arms)]
    workers = [
        subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    trained = [set(re.findall(r"(\S+): measuring", text)) for text in said]
    assert not trained[0] & trained[1]
    assert len(trained[0] | trained[1]) == 7


def test_rates_are_tuned_alike_and_the_lowest_loss_wins(base, tmp_path):
    out = tmp_path / "out"
    more = ("--arms", "base,attention,dex", "--seeds", "1", "--rates", "0.1,30")
    assert main(command(base, out, *more, "--tuning-steps", "3", "--tuning-windows", "2")) == 0
    trials = [json.loads(path.read_text()) for path in sorted((out / "trials").iterdir())]
    assert [trial["steps"] for trial in trials] == [3] * 4
    for name in ("attention", "dex"):
        mine = [trial for trial in trials if trial["arm"] == name]
        best = min(mine, key=lambda trial: trial["loss"])
        assert record(out, f"{name}-0")["rate"] == best["rate"]
    assert collect(out)["trials"][0]["arm"] == "attention"


def test_a_trial_that_diverged_loses(tmp_path):
    settings = StudySettings(model="m", rates=(1.0, 3.0))
    (tmp_path / "trials").mkdir()
    for multiple, loss in ((1, 9.0), (3, None)):
        path = tmp_path / "trials" / f"dex-x{multiple}.json"
        record = {"arm": "dex", "rate": 1e-4 * multiple, "loss": loss, "seconds": 1, "machine": "m"}
        path.write_text(json.dumps(record))
    assert rate_of("dex", settings, tmp_path) == 1e-4
    assert rate_of("attention", settings, tmp_path) is None


def test_the_claim_comes_first_and_seed_by_seed():
    settings = StudySettings(model="m", rates=(1.0,), seeds=2)
    names = [task.name for task in tasks_of(settings, list(settings.arms))]
    assert names[:5] == ["base-0", "attention-0", "dex-0", "attention-1", "dex-1"]
    assert len(names) == len(set(names)) == len(ARMS) + 2


@pytest.mark.parametrize("name", TRAINED)
def test_training_changes_what_the_arm_names_and_nothing_else(name, base, tmp_path):
    ready = ready_arm(name, base, tmp_path)
    model, before = ready.model, {n: p.detach().clone() for n, p in ready.model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for extension in (m for m in model.modules() if type(m).__name__ == "DexExtension"):
        extension.set_step(1)
    ids = torch.arange(40)[None] % 250
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    count = sum((p != before[n]).sum().item() for n, p in model.named_parameters())
    kinds = {re.search(CHANGED[name], n) is not None for n in changed}
    assert kinds == {True}, sorted(changed)
    share = {"lora": 0.4, "full": 0.5}.get(name, 0.9)  # LoRA's A has no gradient at first
    assert share * trained_parameters(model) <= count <= trained_parameters(model)


ATTENTION = r"[kvo]_proj"
CHANGED = {
    "attention": ATTENTION,
    "floor": ATTENTION,
    "dex": ATTENTION + r"|\.dex\.",
    "plus": ATTENTION + r"|\.dex\.",
    "pinned": ATTENTION + r"|\.dex\.weight",
    "extension": r"\.dex\.",
    "lora": r"lora_",
    "retrofit": r"q_proj|\.lam\.",
    "retrofit-attention": r"q_proj|\.lam\.|" + ATTENTION,
    "full": r".",
}


def ready_arm(name, base, tmp_path):
    from diffattn.dex import HeadPlan

    plan = HeadPlan(
        criterion="all", heads={0: [0, 2], 1: [1]}, scores=[], fingerprint="", options={}
    )
    return make_ready(name, base / "model", plan, ramp_steps=2, lam_rate=1.0, seed=0, work=tmp_path)


def test_lora_trains_about_as_many_numbers_as_dex(base, tmp_path):
    dex, lora = (trained_parameters(ready_arm(n, base, tmp_path).model) for n in ("dex", "lora"))
    assert lora == pytest.approx(dex, rel=0.2)  # ranks are whole numbers


def test_the_retrofit_is_the_base_before_it_trains(base, tmp_path):
    ids = torch.arange(40)[None] % 250
    base_model, retrofit = (ready_arm(n, base, tmp_path).model for n in ("base", "retrofit"))
    with torch.no_grad():
        want, got = (m(input_ids=ids, use_cache=False).logits for m in (base_model, retrofit))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_arms_that_a_model_cannot_have_are_left_out_with_the_reason(base, tmp_path, capsys):
    model = families.build("gpt2", vocab_size=300, max_position_embeddings=4000)
    model.save_pretrained(tmp_path / "model")
    for path in (base / "model").glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    shutil.copy(base / "text.jsonl", tmp_path)
    arms = ("--arms", "base,attention,dex,retrofit", "--seeds", "1")
    assert main(command(tmp_path, tmp_path / "out", *arms)) == 0
    assert (
        "left out: retrofit to V2: no exact start as V2: model_type: expected one of"
        in capsys.readouterr().err
    )
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [arm["name"] for arm in results["arms"]] == ["base", "attention", "dex"]
    assert "got &#39;gpt2&#39;" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--arms", "dex,lora"), "expected attention and dex among them"),
        (("--arms", "dex,attention,nonsense"), "got 'nonsense'"),
        (("--arms", "dex,attention,dex"), "expected different names"),
        (("--rates", "0"), "rates: expected multiples above 0"),
        (("--steps", "0"), "steps: expected at least 1"),
        (("--items", "1"), "items: expected at least 2"),
        (("--heldout-windows", "1k"), "data: expected at least 1000 windows"),
        (("--outside", "absent"), "data: absent does not exist"),
        (("--context", "100"), "context: expected at least about"),
        (("--context", "5k"), "context: expected at most 4000, the positions of"),
        (("--heads", "absent.json"), "plan: absent.json cannot be read"),
        (("--lam-rate", "0"), "lam_rate: expected a number above 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(base, tmp_path, capsys, more, says):
    assert main(command(base, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("diffattn dex: ")
    assert says in error[-1]


def test_a_refused_beginning_leaves_the_folder_free(base, tmp_path):
    out = tmp_path / "out"
    assert main(command(base, out, "--heads", "absent.json")) == 2
    assert not out.exists()
    out.mkdir()
    assert main(command(base, out, "--context", "100")) == 2
    assert list(out.iterdir()) == []


def test_text_outside_must_not_be_the_text(base, tmp_path, capsys):
    assert main(command(base, tmp_path / "out", "--outside", str(base / "text.jsonl"))) == 2
    assert "outside: expected other text than data" in capsys.readouterr().err


def test_a_study_may_grow_and_never_shrinks(base, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(command(base, out, "--arms", "attention,dex", "--seeds", "1")) == 0
    kept = record(out, "dex-0")
    assert main(command(base, out, "--arms", "base,attention,dex", "--resume")) == 0
    assert record(out, "dex-0") == kept
    assert record(out, "dex-1")["seed"] == 1
    assert main(command(base, out, "--arms", "attention,dex", "--resume")) == 2
    assert "arms: expected" in capsys.readouterr().err


def test_a_damaged_record_is_made_again(base, studied, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(studied, out)
    lost = record(out, "attention-1")
    (out / "runs" / "attention-1.json").write_text('{"arm": "atten')
    (out / "runs" / "attention-9.json").write_text("junk")
    assert main(command(base, out, "--resume")) == 0
    again = record(out, "attention-1")
    assert again["measures"]["heldout_loss"] == pytest.approx(lost["measures"]["heldout_loss"])


@pytest.mark.parametrize("name", ["left_out.json", "inputs.json", "settings.json"])
def test_other_damaged_files_are_named(base, studied, tmp_path, capsys, name):
    out = tmp_path / "out"
    shutil.copytree(studied, out)
    (out / name).write_text("[1")
    assert main(command(base, out, "--resume")) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("diffattn dex: out: ")


def changed_outside(folder):
    (folder / "other.txt").write_text("quite another text\n" * 60)


def changed_configuration(folder):
    path = folder / "model" / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))


def changed_tokenizer(folder):
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed_outside, "outside: "),
        (changed_configuration, "configuration: "),
        (changed_tokenizer, "tokenizer: "),
    ],
)
def test_what_a_study_rests_on_must_stay(base, tmp_path, capsys, change, says):
    copy = tmp_path / "base"
    shutil.copytree(base, copy)
    (copy / "other.txt").write_text("another text\n" * 80)
    more = ("--arms", "attention,dex", "--seeds", "1", "--outside", str(copy / "other.txt"))
    assert main(command(copy, tmp_path / "out", *more)) == 0
    change(copy)
    assert main(command(copy, tmp_path / "out", *more, "--resume")) == 2
    assert f"{says}it is no longer the one" in capsys.readouterr().err


def test_weights_that_are_no_numbers_are_refused(base, tmp_path, capsys):
    model = families.build("llama", vocab_size=300, max_position_embeddings=4000)
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    shutil.copytree(base, tmp_path / "base")
    model.save_pretrained(tmp_path / "base" / "model")
    assert main(command(tmp_path / "base", tmp_path / "out")) == 2
    assert "has NaN or infinity in 1 of its tensors" in capsys.readouterr().err


def test_runs_that_end_without_numbers_are_told_as_diverged(base, tmp_path, capsys):
    out = tmp_path / "out"
    more = ("--arms", "attention,dex", "--seeds", "1", "--rates", "1e32", "--steps", "1")
    assert main(command(base, out, *more)) == 0
    assert record(out, "dex-0")["diverged"]
    assert (
        "Diverged, and left out of every mean: attention only (seed 0); DEX"
        in (out / "claim.md").read_text()
    )


def test_a_trial_without_a_finite_loss_never_wins(base, tmp_path):
    out = tmp_path / "out"
    more = ("--arms", "attention,dex", "--seeds", "1", "--rates", "1e32,1")
    assert main(command(base, out, *more, "--tuning-steps", "1", "--tuning-windows", "2")) == 0
    assert record(out, "dex-0")["rate"] == pytest.approx(1e-4)
    assert not record(out, "dex-0")["diverged"]


def test_numbers_that_are_none_are_refused(base, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command(base, tmp_path / "out", "--rates", "1,x"))
    assert stopped.value.code == 2
    assert "expected numbers separated by commas" in capsys.readouterr().err


def test_another_text_or_other_settings_do_not_go_on(base, studied, tmp_path, capsys):
    assert main(command(base, studied, "--resume", "--length", "40")) == 2
    assert "length: expected 48" in capsys.readouterr().err
    copy = tmp_path / "base"
    shutil.copytree(base, copy)
    out = tmp_path / "out"
    arms = ("--arms", "attention,dex", "--seeds", "1")
    assert main(command(copy, out, *arms)) == 0
    with (copy / "text.jsonl").open("a") as file:
        file.write('\n{"text": "more of it"}')
    assert main(command(copy, out, *arms, "--resume")) == 2
    assert "data: it is no longer the one" in capsys.readouterr().err


def test_the_fetched_model_has_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["dex", "study", "smollm2", "--out", str(tmp_path / "out")]) == 2
    assert "run diffattn fetch smollm2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
