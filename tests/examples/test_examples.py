"""The examples run, learn, and are what they say they are."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from diffattn import SoftmaxAttention, diff_attention

sys.path.append(str(Path(__file__).parents[2] / "examples"))

accuracy = importlib.import_module("accuracy")
cross = importlib.import_module("cross_attention")
vision = importlib.import_module("vision_transformer")


@pytest.mark.parametrize("attention", list(cross.ATTENTION))
def test_questions_to_a_padded_set_are_answered(attention):
    torch.manual_seed(0)
    model = cross.Reader(attention)
    cross.train(model, steps=150, seed=0)
    sets = cross.draw_sets(200, torch.Generator().manual_seed(9))
    low, _ = accuracy.wilson_interval(cross.right_answers(model, sets), 1000)
    assert low > 0.85  # a guess is right in 1 of 8
    # what stands in the padding does not matter
    poisoned = sets._replace(values=torch.where(sets.visible, sets.values, 0))
    torch.testing.assert_close(model(poisoned), model(sets), rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["v1", "v2"])
def test_shapes_in_noise_are_told_apart(attention):
    torch.manual_seed(0)
    model = vision.VisionTransformer(attention)
    vision.train(model, steps=100, seed=0)
    images, labels = vision.draw_images(1000, torch.Generator().manual_seed(9))
    low, _ = accuracy.wilson_interval(vision.held_out(model, images, labels), 1000)
    assert low > 0.4  # a guess is right in 1 of 4


@pytest.mark.parametrize("attention", list(vision.ATTENTION))
def test_a_bidirectional_model_does_not_see_the_order_of_its_tokens(attention):
    model = vision.VisionTransformer(attention)
    images, labels = vision.draw_images(4, torch.Generator().manual_seed(1))
    tokens = model.tokens(images)
    order = torch.randperm(tokens.shape[1])
    logits = model.classify(tokens)
    torch.testing.assert_close(model.classify(tokens[:, order]), logits, rtol=0, atol=1e-5)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_maps_of_an_image_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    model = vision.VisionTransformer("v1")
    image = vision.draw_images(1, torch.Generator().manual_seed(1))[0][0]
    maps = vision.attention_maps(model, image)
    lam = model.blocks[-1].attention.lam(image).item()
    rows = maps["signal - lam noise"].sum(-1)
    torch.testing.assert_close(rows, torch.full_like(rows, 1 - lam))
    vision.save_maps(tmp_path / "maps.png", model, image)
    assert (tmp_path / "maps.png").read_bytes()[:4] == b"\x89PNG"


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


def test_the_intervals_of_the_examples():
    assert accuracy.wilson_interval(20, 20)[0] == pytest.approx(0.839, abs=1e-3)
    assert isinstance(cross.ATTENTION["softmax"](8, 2, 0), SoftmaxAttention)
