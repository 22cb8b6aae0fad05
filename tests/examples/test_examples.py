"""The examples run, learn, and are what they say they are."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from diffattn import diff_attention

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

accuracy = importlib.import_module("accuracy")
cross = importlib.import_module("cross_attention")
vision = importlib.import_module("vision_transformer")


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def assert_gradients_everywhere(model):
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("right", "total", "want"),
    [(20, 20, (0.8389, 1.0)), (3, 10, (0.1078, 0.6032)), (0, 10, (0.0, 0.2775))],
)
def test_the_intervals_of_the_examples(right, total, want):
    assert accuracy.wilson_interval(right, total) == pytest.approx(want, abs=1e-4)


def test_images_are_a_function_of_their_seed():
    images, labels = vision.draw_images(200, drawn(0))
    assert torch.equal(images, vision.draw_images(200, drawn(0))[0])
    assert not torch.equal(images, vision.draw_images(200, drawn(1))[0])
    assert set(labels.tolist()) == {0, 1, 2, 3}
    assert images.var().item() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("attention", ["v1", "v2"])
def test_shapes_in_noise_are_told_apart(attention):
    torch.manual_seed(0)
    model = vision.VisionTransformer(attention, width=32)
    vision.train(model, steps=150, seed=0, batch=32)
    images, labels = vision.draw_images(1000, drawn(9))
    low, _ = accuracy.wilson_interval(vision.held_out(model, images, labels), 1000)
    assert low > 0.4  # a guess is right in 1 of 4


@pytest.mark.parametrize("attention", list(vision.ATTENTION))
def test_a_bidirectional_model_does_not_see_the_order_of_its_tokens(attention):
    model = vision.VisionTransformer(attention).double()
    images, labels = vision.draw_images(4, drawn(1))
    tokens = model.tokens(images.double())
    order = torch.randperm(tokens.shape[1])
    logits = model.classify(tokens)
    torch.testing.assert_close(model.classify(tokens[:, order]), logits, rtol=0, atol=1e-12)
    # patches that change places and leave their positions behind are another image
    moved = (tokens - model.positions)[:, order] + model.positions
    assert (model.classify(moved) - logits).abs().max() > 1e-4
    F.cross_entropy(logits, labels).backward()
    assert_gradients_everywhere(model)


@pytest.mark.parametrize("attention", list(vision.ATTENTION))
def test_the_drawn_maps_are_those_of_the_layer(attention):
    model = vision.VisionTransformer(attention).double()
    images = vision.draw_images(1, drawn(1))[0].double()
    *_, weights = vision.attention_maps(model, images[0]).values()
    before, last = model.blocks
    x, layer = last.attention_norm(before(model.tokens(images))), last.attention
    heads = torch.einsum("hts,bshe->bthe", weights, layer.values(x))
    if attention == "v1":
        heads = layer.subln(heads)
    torch.testing.assert_close(layer.output(x, heads), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", list(vision.ATTENTION))
def test_maps_of_an_image_are_drawn(attention, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    path = tmp_path / "maps.png"
    vision.main(["--attention", attention, "--steps", "1", "--save-map", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"{attention}: " in capsys.readouterr().out


def test_a_picture_needs_one_kind_of_attention(capsys):
    with pytest.raises(SystemExit, match="2"):
        vision.main(["--save-map", "maps.png"])
    assert "--save-map: " in capsys.readouterr().err


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="2"):
        vision.main(["--attention", "v1", "--save-map", "maps.png"])
    assert "diffattn[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("no-such-folder/maps.png", "expected a file in a folder that exists, got "),
        (".", "expected a file in a folder that exists, got "),
        ("maps", "expected a picture (."),
        ("maps.xyz", "expected a picture (."),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_training(
    path, expected, monkeypatch, tmp_path, capsys
):
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vision, "train", None)
    with pytest.raises(SystemExit, match="2"):
        vision.main(["--attention", "v1", "--save-map", path])
    assert "--save-map: " + expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("steps", ["0", "-3", "x"])
@pytest.mark.parametrize("example", [cross, vision], ids=["cross", "vision"])
def test_no_steps_are_refused(example, steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main([f"--steps={steps}"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"--steps: expected a whole number, at least 1, got {steps!r}")


def test_questions_ask_for_visible_items():
    sets = cross.draw_sets(100, drawn(0))
    found = (sets.questions[:, :, None] == sets.keys[:, None, :]) & sets.visible[:, None, :]
    assert (found.sum(-1) == 1).all()
    assert torch.equal((found * sets.values[:, None, :]).sum(-1), sets.answers)
    assert {4, 12} <= set(sets.visible.sum(-1).tolist())


@pytest.mark.parametrize("attention", list(cross.ATTENTION))
def test_questions_to_a_padded_set_are_answered(attention):
    torch.manual_seed(0)
    model = cross.Reader(attention)
    cross.train(model, steps=100, seed=0)
    sets = cross.draw_sets(200, drawn(9))
    low, _ = accuracy.wilson_interval(cross.right_answers(model, sets), 1000)
    assert low > 0.85  # a guess is right in 1 of 8


@pytest.mark.parametrize("attention", list(cross.ATTENTION))
def test_neither_the_padding_nor_the_order_of_items_matters(attention):
    model = cross.Reader(attention).double()
    sets, others = cross.draw_sets(64, drawn(0)), cross.draw_sets(64, drawn(1))
    logits = model(sets)
    poisoned = sets._replace(
        keys=torch.where(sets.visible, sets.keys, others.keys),
        values=torch.where(sets.visible, sets.values, others.values),
    )
    torch.testing.assert_close(model(poisoned), logits, rtol=0, atol=1e-12)
    order = torch.randperm(cross.ITEMS)
    shuffled = sets._replace(
        keys=sets.keys[:, order], values=sets.values[:, order], visible=sets.visible[:, order]
    )
    torch.testing.assert_close(model(shuffled), logits, rtol=0, atol=1e-12)
    unmasked = sets._replace(visible=torch.ones_like(sets.visible))
    assert (model(unmasked) - logits).abs().max() > 1e-4
    F.cross_entropy(logits.flatten(0, 1), sets.answers.flatten()).backward()
    assert_gradients_everywhere(model)


def test_seven_queries_over_four_keys_with_the_last_one_masked():
    layer = cross.ATTENTION["v1"](32, 4, 1, context_size=16).double()
    x, context = torch.randn(2, 7, 32).double(), torch.randn(2, 4, 16).double()
    mask = torch.tensor([True, True, True, False])[None, None, None]
    got = layer(x, context, mask=mask)
    torch.testing.assert_close(got, layer(x, context[:, :3]), rtol=0, atol=1e-12)
    q = layer.queries(x, None).unflatten(2, (-1, 2))
    k = layer.keys(context, None).unflatten(2, (-1, 2))
    heads = diff_attention(
        q[..., 0, :], k[..., 0, :], layer.values(context), q[..., 1, :], k[..., 1, :],
        lam=layer.lam(x), mask=mask, impl="reference",
    )  # fmt: skip
    want = layer.output(x, layer.subln(heads))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_an_example_runs_as_a_script_with_torch_alone():
    blocked = "sys.modules.update(dict.fromkeys(['matplotlib', 'transformers']))"
    arguments = "sys.argv[1:] = ['--attention', 'v1', '--steps', '2']"
    path = f"sys.path.insert(0, {str(EXAMPLES)!r})"
    run = "runpy.run_module('cross_attention', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy, sys; {blocked}; {arguments}; {path}; {run}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "of 5,000 held-out questions right" in done.stdout
