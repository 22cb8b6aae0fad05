"""Redundancy of heads on layers whose heads are known."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="models need the extra hf")
sys.path.append(str(Path(__file__).parents[1] / "dex"))

import families

from diffattn.analysis import head_redundancy
from diffattn.analysis.redundancy import _cka, _distance
from diffattn.dex import DexConfig, inject, set_step

IDS = torch.arange(24)[None] * 5 % 64


def test_equal_maps_have_no_distance_and_disjoint_ones_have_one():
    maps = torch.eye(6)[None].repeat(3, 1, 1)
    assert _distance(maps) == pytest.approx(0.0, abs=1e-6)
    maps[1] = torch.eye(6).roll(1, 0)
    assert _distance(maps) == pytest.approx(2 / 3, abs=1e-6)  # two pairs of three differ


def test_cka_does_not_see_rotations_and_scales():
    torch.manual_seed(0)
    outputs = torch.randn(1, 50, 4)
    rotation = torch.linalg.qr(torch.randn(4, 4))[0]
    alike = torch.cat((outputs, 3 * outputs @ rotation + 1))
    assert _cka(alike) == pytest.approx(1.0, abs=1e-5)
    assert _cka(torch.randn(2, 5000, 4)) < 0.05


def test_cka_equals_its_definition():
    torch.manual_seed(0)
    a, b = torch.randn(2, 30, 4).double()
    x, y = a - a.mean(0), b - b.mean(0)
    k, m = x @ x.T, y @ y.T  # by Gram matrices instead of covariances
    want = (k * m).sum() / (k.norm() * m.norm())
    assert _cka(torch.stack((a, b))) == pytest.approx(want.item(), rel=1e-9)


@pytest.mark.parametrize("name", ["llama", "gpt2", "diffattn v1-gqa", "diffattn v2-gqa"])
def test_every_layer_gets_both_numbers(name):
    model = families.build(name)
    model.set_attn_implementation("sdpa")
    found = head_redundancy(model, [IDS, IDS.flip(1)])
    assert len(found.map_distance) == len(found.output_cka) == model.config.num_hidden_layers
    assert all(0 <= value <= 2 for value in found.map_distance)
    assert all(0 <= value <= 1 + 1e-6 for value in found.output_cka)
    assert model.config._attn_implementation == "sdpa"


def test_outputs_are_those_behind_the_extension():
    model = families.build("llama")
    before = head_redundancy(model, [IDS])
    inject(model, DexConfig(ramp_steps=0, heads={0: [0], 1: [0]}))
    assert head_redundancy(model, [IDS]) == before  # lam is 0
    for extension in (m for m in model.modules() if type(m).__name__ == "DexExtension"):
        extension.lambda_learn.data.fill_(0.9)
    set_step(model, 1)
    after = head_redundancy(model, [IDS])
    assert after.map_distance[0] == before.map_distance[0]
    assert after.output_cka[0] != before.output_cka[0]


def test_no_sequences_is_an_error():
    with pytest.raises(ValueError, match="expected at least one"):
        head_redundancy(families.build("llama"), [])
