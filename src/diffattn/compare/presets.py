"""Sizes of a comparison, from seconds on a laptop to hours on an accelerator."""

import difflib
from dataclasses import dataclass

from diffattn.errors import UserError

# beyond any corpus; keeps sizes within what arithmetic with floats holds exactly
MOST = 10**15


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Model, training and evaluation of one size of comparison."""

    name: str
    """Of the preset."""
    about: str
    """What it is for and how long it takes."""
    hidden_size: int
    """Model width."""
    num_hidden_layers: int
    """Blocks."""
    match_heads: int
    """Heads of the Transformer arm."""
    vocab_size: int
    """Entries of the tokenizer that is trained on the text."""
    length: int
    """Tokens of a training sequence."""
    rows_per_step: int
    """Windows of text, or their tokens in recall sequences, of an optimizer step."""
    tokens: int
    """Training tokens of one run."""
    learning_rate: float
    """Peak learning rate."""
    recall_share: float
    """Share of the optimizer steps that train recall."""
    recall_classes: int = 16
    """Classes a question can ask for."""
    recall_values: int = 16
    """Values of a class; guessing one of them scores 1/values."""
    recall_needles: int = 8
    """Needles of a training sequence."""
    recall_queries: int = 7
    """Questions of a training sequence."""
    recall_cells: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (4, 2), (6, 2))
    """Pairs of needles N and questions R that are evaluated, as in the paper's Table 2."""
    recall_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Depths of the first queried needle."""
    recall_lengths: tuple[int, ...]
    """Tokens of the evaluated recall sequences."""
    recall_samples: int
    """Sequences for each length, cell and depth."""
    heldout_windows: int
    """Windows of held-out text that decide the loss."""
    curve_windows: int
    """Windows of held-out text behind a point of the loss curve."""
    curve_points: int
    """Points of the loss curve."""
    speed_rounds: int
    """Counted rounds of the speed measurement."""
    save_every: int
    """Steps between two checkpoints."""
    bf16: bool = False
    """Whether to compute under bf16 autocast."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "length", "tokens", "rows_per_step"):
            if not 1 <= getattr(self, name) <= MOST:
                raise UserError(f"{name}: expected 1 to {MOST:,}, got {getattr(self, name)}")


_PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="smoke",
            about="checks that everything runs; under a minute, and too small to learn recall",
            hidden_size=64,
            num_hidden_layers=2,
            match_heads=4,
            vocab_size=512,
            length=64,
            rows_per_step=8,
            tokens=16_000,
            learning_rate=4e-3,
            recall_share=0.25,
            recall_needles=4,
            recall_queries=4,
            recall_cells=((1, 1), (4, 2)),
            recall_depths=(0.0, 0.5, 1.0),
            recall_lengths=(64,),
            recall_samples=4,
            heldout_windows=32,
            curve_windows=8,
            curve_points=3,
            speed_rounds=5,
            save_every=10,
        ),
        Preset(
            name="quick",
            about="two layers for a first look; under ten minutes for four arms on two cores",
            hidden_size=64,
            num_hidden_layers=2,
            match_heads=4,
            vocab_size=1024,
            length=128,
            rows_per_step=8,
            tokens=500_000,
            learning_rate=4e-3,
            recall_share=0.5,
            recall_lengths=(256, 512, 1024),
            recall_samples=4,
            heldout_windows=192,
            curve_windows=32,
            curve_points=8,
            speed_rounds=9,
            save_every=200,
        ),
        Preset(
            name="laptop",
            about="six layers on millions of tokens; hours on two cores",
            hidden_size=256,
            num_hidden_layers=6,
            match_heads=8,
            vocab_size=4096,
            length=256,
            rows_per_step=16,
            tokens=8_000_000,
            learning_rate=2e-3,
            recall_share=0.25,
            recall_lengths=(512, 1024, 2048),
            recall_samples=10,
            heldout_windows=512,
            curve_windows=64,
            curve_points=20,
            speed_rounds=9,
            save_every=200,
        ),
        Preset(
            name="gpu",
            about="twelve layers of width 768 under bf16; an hour or more a run on one accelerator",
            hidden_size=768,
            num_hidden_layers=12,
            match_heads=12,
            vocab_size=16_384,
            length=1024,
            rows_per_step=64,
            tokens=500_000_000,
            learning_rate=1e-3,
            recall_share=0.1,
            recall_lengths=(2048, 4096, 8192),
            recall_samples=50,
            heldout_windows=1024,
            curve_windows=128,
            curve_points=50,
            speed_rounds=20,
            save_every=500,
            bf16=True,
        ),
    )
}
PRESETS = tuple(_PRESETS.values())
PRESET_NAMES = tuple(_PRESETS)


def get_preset(name: str) -> Preset:
    """The preset of this name.

    Args:
        name: one of `PRESET_NAMES`.

    Raises:
        UserError: no such preset; near names are suggested.
    """
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, _PRESETS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"preset: expected one of {', '.join(_PRESETS)}, got {name!r}{hint}")
    return _PRESETS[name]
