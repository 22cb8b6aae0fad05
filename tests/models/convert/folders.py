"""Checkpoint folders to convert, and the command that converts them."""

import contextlib
import io
import json

import torch

from diffattn.cli import main
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM

SIZES = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "match_heads": 4}


def ours(folder, **choices):
    """One of our models with these choices, saved."""
    torch.manual_seed(0)
    config = DiffTransformerConfig(**SIZES | choices)
    DiffTransformerForCausalLM(config).save_pretrained(folder)
    return folder


def changed(folder, **values):
    """Values of config.json replaced."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def convert(*words):
    """Exit code and last line on standard error of `diffattn convert`."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(["convert", *map(str, words)])
    return code, said.getvalue().strip().splitlines()[-1]
