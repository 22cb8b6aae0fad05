"""`diffattn dex adapt`, `select` and `merge`, from a folder to a stock checkpoint."""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="DEX needs the extra hf")
import families

from diffattn.cli import main
from diffattn.dex.plan import HeadPlan


def adapt(base, out, *more, steps=6):
    arguments = ["dex", "adapt", str(base / "model"), "--data", str(base / "text.jsonl")]
    arguments += ["--out", str(out), "--steps", str(steps), "--length", "48"]
    return main([*arguments, "--learning-rate", "1e-2", "--heldout-windows", "6", *more])


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("adapted") / "adapter"
    assert adapt(base, out) == 0
    return out


def test_an_adaptation_lowers_the_held_out_loss(adapted):
    result = json.loads((adapted / "adapt.json").read_text())
    low, high = result["interval"]
    assert low < high < 0
    assert result["difference"] == pytest.approx(result["after"] - result["before"])
    plan = HeadPlan.read(adapted / "plan.json")
    assert {len(heads) for heads in plan.heads.values()} == {2}
    assert {path.name for path in adapted.glob("dex_*")} == {
        "dex_config.json", "dex_model.safetensors"
    }  # fmt: skip
    assert len((adapted / "run" / "metrics.jsonl").read_text().splitlines()) == 6


GENERATE = """
import sys
sys.modules["diffattn"] = None  # as if it were not installed
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("the state of our union", return_tensors="pt")["input_ids"]
print(model.dtype, model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist())
"""


def test_the_merged_checkpoint_generates_in_plain_transformers(base, adapted, tmp_path, capsys):
    assert main(["dex", "merge", str(adapted), "--out", str(tmp_path / "merged")]) == 0
    said = capsys.readouterr().err
    change = float(said.split("in fp32: ")[1].split()[0])
    assert change < 1e-5
    assert "rounding the weights to bfloat16" in said
    run = [sys.executable, "-c", GENERATE, str(tmp_path / "merged")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.bfloat16 [")
    assert main(["dex", "merge", str(adapted), "--out", str(tmp_path / "merged")]) == 2


def test_select_writes_a_plan_and_a_picture_that_adapt_takes(base, tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = ["dex", "select", str(base / "model"), "--data", str(base / "text.jsonl")]
    arguments += ["--out", str(out), "--sequences", "3", "--length", "48", "--count", "1"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.count("[") == 3  # two heads and the legend
    assert "peak memory" in shown.err
    assert out.with_suffix(".png").exists()
    assert adapt(base, tmp_path / "out", "--heads", str(out), steps=2) == 0
    config = json.loads((tmp_path / "out" / "dex_config.json").read_text())["config"]
    assert [len(heads) for heads in config["heads"].values()] == [1, 1]


def test_a_finished_adaptation_is_not_trained_again(base, adapted, capsys):
    before = (adapted / "dex_model.safetensors").read_bytes()
    assert adapt(base, adapted) == 2
    assert "--resume" in capsys.readouterr().err
    assert adapt(base, adapted, "--resume") == 0
    assert (adapted / "dex_model.safetensors").read_bytes() == before


def unfinished(folder, base):
    shutil.copytree(base / "model", folder)
    (folder / "unfinished.txt").write_text("")
    return folder


def pickled(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda b, p: ["adapt", str(p / "absent"), "--steps", "1", "--out", str(p / "o")], "model"),
        (lambda b, p: ["adapt", str(p), "--steps", "1", "--out", str(p / "o")], "config.json"),
        (
            lambda b, p: ["adapt", str(pickled(p / "b")), "--steps", "1", "--out", str(p / "o")],
            "only pickled weights",
        ),
        (
            lambda b, p: [
                *("adapt", str(unfinished(p / "u", b)), "--steps", "1", "--out", str(p / "o"))
            ],
            "is unfinished",
        ),
        (
            lambda b, p: [
                *("adapt", str(b / "model"), "--data", str(b / "text.jsonl"), "--steps", "1"),
                *("--out", str(p / "o"), "--length", "4k"),
            ],
            "fewer than",
        ),
        (
            lambda b, p: ["adapt", str(b / "model"), "--steps", "0", "--out", str(p / "o")],
            "steps: expected at least 1",
        ),
        (
            lambda b, p: [
                *("adapt", str(b / "model"), "--data", str(b / "text.jsonl"), "--steps", "1"),
                *("--out", str(p / "o"), "--length", "48", "--heads", str(p / "no.json")),
            ],
            "plan: ",
        ),
        (lambda b, p: ["merge", str(p), "--out", str(p / "o")], "expected a folder with dex_conf"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, says, base, tmp_path, capsys):
    assert main(["dex", *arguments(base, tmp_path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("diffattn dex: ")
    assert says in error[-1]


def test_other_settings_do_not_go_on_with_a_folder(base, adapted, capsys):
    assert adapt(base, adapted, "--resume", steps=7) == 2
    assert "steps: expected 6" in capsys.readouterr().err


def test_an_adapter_of_another_base_is_refused(adapted, tmp_path, capsys):
    families.build("llama", vocab_size=290).save_pretrained(tmp_path / "other")
    arguments = ["dex", "merge", str(adapted), "--base", str(tmp_path / "other")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "expected the base of the adapter" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_other_weights_is_refused(adapted, tmp_path, capsys):
    model = families.build("llama", vocab_size=300, max_position_embeddings=4000)
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            parameter.data *= 0.3
    model.save_pretrained(tmp_path / "other")
    arguments = ["dex", "merge", str(adapted), "--base", str(tmp_path / "other")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "expected the weights that the adapter" in capsys.readouterr().err


def test_a_merge_keeps_fp32_where_asked(adapted, tmp_path):
    out = tmp_path / "merged"
    assert main(["dex", "merge", str(adapted), "--out", str(out), "--dtype", "float32"]) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert (out / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_a_changed_base_does_not_go_on(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "base")
    assert adapt(tmp_path / "base", tmp_path / "out", steps=2) == 0
    model = families.build("llama", vocab_size=300, max_position_embeddings=4000)
    model.lm_head.weight.data *= 2
    model.bfloat16().save_pretrained(tmp_path / "base" / "model")
    assert adapt(tmp_path / "base", tmp_path / "out", "--resume", steps=2) == 2
    assert "model: it is no longer the one" in capsys.readouterr().err


def test_an_adaptation_that_diverged_says_so(base, tmp_path, capsys):
    out = tmp_path / "out"
    assert adapt(base, out, "--learning-rate", "1e32", steps=1) == 2
    assert "learning_rate: 1e+32 left a model without" in capsys.readouterr().err
    assert not (out / "adapt.json").exists()


def test_two_processes_do_not_train_one_adapter(base, tmp_path, capsys):
    from diffattn.locks import held

    out = tmp_path / "out"
    assert adapt(base, out, steps=2) == 0
    (out / "adapt.json").unlink()
    with held(out / ".lock", wait=False):
        assert adapt(base, out, "--resume", steps=2) == 2
    assert "another process works on" in capsys.readouterr().err


def test_a_plan_is_json_and_its_picture_lies_beside_it(base, tmp_path, capsys):
    arguments = ["dex", "select", str(base / "model"), "--data", str(base / "text.jsonl")]
    assert main([*arguments, "--out", str(tmp_path / "plan.png")]) == 2
    assert "out: expected a JSON file" in capsys.readouterr().err
