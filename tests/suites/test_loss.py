"""The measures of the suite `loss` against sums by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from diffattn.data import Document
from diffattn.data.repeats import PairCounts, frequency_cut, repeated_pairs
from diffattn.dex.base import load_base
from diffattn.evaluation.token_losses import batch_token_losses, token_losses
from diffattn.suites import loss
from diffattn.suites.subject import Loaded, load
from diffattn.suites.text import Text

# a text of few words repeats nearly every pair, so nearly all of them may count
SETTINGS = loss.Settings(characters=600, windows=2, chunk=64, share=0.99)


@pytest.fixture
def loaded(place):
    return load(place / "one", torch.float32)


def text(*documents, training=()):
    made = [Document(f"d{n}", words) for n, words in enumerate(documents)]
    return Text(made, [Document("t", words) for words in training] or made, "a text")


class Knows:
    """A stand-in for a model that gives the next token of a known sequence a probability."""

    training, device = False, torch.device("cpu")

    def __init__(self, ids, probability):
        self.ids, self.probability, self.read = list(ids), probability, 0
        self.config = LlamaConfig(num_hidden_layers=1)

    def eval(self):
        return self

    def train(self, mode):
        return self

    def __call__(self, input_ids, past_key_values, use_cache):
        count = input_ids.shape[1]
        assert input_ids[0].tolist() == self.ids[self.read : self.read + count]
        logits = torch.full((1, count, 300), math.log((1 - self.probability) / 299))
        for n in range(count):
            logits[0, n, self.ids[self.read + n + 1]] = math.log(self.probability)
        self.read += count
        return SimpleNamespace(logits=logits)


def values(loaded, model, text):
    (window, *others) = loss.items(SETTINGS, loaded, text)
    assert not others
    stand_in = Loaded(model(window.prompt), tokenizer=None, limit=None)
    (record,) = loss.measure(SETTINGS, stand_in, [window])
    return window, record["values"]


def test_oracle_and_uniform_model(loaded):
    words = ("we will work for peace " * 40)[:700]
    window, known = values(loaded, lambda ids: Knows(ids, 1 - 1e-12), text(words))
    assert all(abs(value) < 1e-6 for value in known.values() if value is not None)
    _, guessed = values(loaded, lambda ids: Knows(ids, 1 / 300), text(words))
    tokens, size = len(window.prompt) - 1, int(window.sizes.sum())
    assert guessed["nats_per_token"] == pytest.approx(math.log(300), rel=1e-6)
    assert guessed["bits_per_byte"] == pytest.approx(tokens * math.log2(300) / size, rel=1e-6)
    assert guessed["ar_hit"] == pytest.approx(math.log(300), rel=1e-6)


def test_bins_cover_the_window(loaded):
    """Bits of all bins, weighed by their bytes, are the bits of the window, also of two bytes."""
    words = ("der höhere Bär träumt für Öl " * 40)[:640]
    window, found = values(loaded, lambda ids: Knows(ids, 0.3), text(words))
    given = len(loaded.tokenizer.decode(window.prompt[:1]).encode())
    assert int(window.sizes.sum()) == len(words[:600].encode()) - given
    sizes = [
        window.sizes[(window.starts >= a) & (window.starts < b)].sum() for a, b in SETTINGS.bins
    ]
    bins = [found[f"bits_per_byte[{a}:{b}]"] for a, b in SETTINGS.bins]
    assert np.average(bins, weights=sizes) == pytest.approx(found["bits_per_byte"])
    assert SETTINGS.bins == [(0, 256), (256, 512), (512, 600)]


@pytest.mark.parametrize("puts_bos", [False, True])
def test_bos_is_what_the_tokenizer_puts(loaded, with_bos, puts_bos):
    if puts_bos:
        loaded = replace(loaded, tokenizer=with_bos(loaded.tokenizer))
    (window,) = loss.items(SETTINGS, loaded, text("peace for the people " * 32))
    ids = list(window.prompt)
    assert ids.count(loaded.tokenizer.bos_token_id) == puts_bos == (ids[0] == 0)
    assert len(window.starts) == len(window.sizes) == len(window.hits) == len(ids) - 1
    # without it the first token is given, so its bytes are not counted
    missing = 0 if puts_bos else len(loaded.tokenizer.decode(ids[:1]))
    assert int(window.sizes.sum()) == 600 - missing


def test_windows_stand_one_behind_the_other_and_share_a_cluster(loaded):
    found = loss.items(SETTINGS, loaded, text("peace for the people " * 100, "too short"))
    assert [(window.id, window.cluster) for window in found] == [("d0/0", "d0"), ("d0/1", "d0")]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_give_the_losses_of_one_pass(place, chunk):
    model = load_base(place / "one")
    ids = torch.randint(300, (50,))
    logits = model(input_ids=ids[None]).logits[0, :-1].double()
    wanted = -logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    got = token_losses(model, ids.tolist(), chunk=chunk)
    np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_texts_of_a_batch_do_not_see_one_another(place, chunk):
    model = load_base(place / "one")
    rows = [torch.randint(300, (length,)).tolist() for length in (50, 9, 31)]
    found = batch_token_losses(model, rows, chunk=chunk)
    for ids, got in zip(rows, found, strict=True):
        np.testing.assert_allclose(got, token_losses(model, ids), rtol=1e-4, atol=1e-5)


def test_repeated_pairs():
    #       0  1  2  0  1  3  0  1  (0, 1) comes again twice, once after each 2 and 3
    ids = [0, 1, 2, 0, 1, 3, 0, 1]
    counts = PairCounts.of([[0, 1, 0, 1], [5, 0]])
    assert repeated_pairs(ids, counts).tolist() == [-1, -1, -1, 2, -1, -1, 2]
    assert repeated_pairs(ids, PairCounts.of([])).tolist() == [-1, -1, -1, 0, -1, -1, 0]


@pytest.mark.parametrize(("share", "cut"), [(0.1, -1), (0.2, 6), (0.4, 6), (0.5, 8), (0.9, 9)])
def test_cut_leaves_at_most_the_share(share, cut):
    """Of ten tokens two repeat pairs that training never had, three had 7 times, one 9 times."""
    repeats = [np.array([-1, 0, 0, 7]), np.array([-1, -1, 7, 9, -1, 7])]
    assert frequency_cut(repeats, share) == cut
    every = np.concatenate(repeats)
    assert ((every >= 0) & (every <= cut)).mean() <= share
