"""Cross-attention to a padded set: an encoder-decoder model that answers questions.

A set holds up to 12 items, each a key with a value; a question is a key that is in the set, and
its answer is that key's value. The encoder lets the items of a set see one another, the decoder's
questions attend to the encoded items. Sets differ in size, so they are padded, and a mask hides
the padding from both.

    python examples/cross_attention.py
    python examples/cross_attention.py --attention v2
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import arguments
import torch
import torch.nn.functional as F
from accuracy import describe
from torch import Tensor, nn

from diffattn import DiffAttention, SoftmaxAttention

KEYS, VALUES, ITEMS, QUESTIONS = 32, 8, 12, 5

ATTENTION: dict[str, Callable[..., nn.Module]] = {
    "softmax": lambda width, heads, layer_idx, **options: SoftmaxAttention(
        width, num_heads=heads, causal=False, **options
    ),
    "v1": lambda width, heads, layer_idx, **options: DiffAttention.v1(
        width, match_heads=heads, layer_idx=layer_idx, causal=False, **options
    ),
    "v2": lambda width, heads, layer_idx, **options: DiffAttention.v2(
        width, match_heads=heads, causal=False, **options
    ),
}


class Sets(NamedTuple):
    """A batch of padded sets with questions; padding holds random items."""

    keys: Tensor
    """[B, ITEMS], no key twice in a row."""
    values: Tensor
    """[B, ITEMS]."""
    visible: Tensor
    """[B, ITEMS] bool, False at padding."""
    questions: Tensor
    """[B, QUESTIONS] keys of visible items."""
    answers: Tensor
    """[B, QUESTIONS] values of the asked keys."""


def draw_sets(count: int, generator: torch.Generator) -> Sets:
    """Sets of 4 to ITEMS items."""
    keys = torch.rand(count, KEYS, generator=generator).argsort(-1)[:, :ITEMS]
    values = torch.randint(VALUES, (count, ITEMS), generator=generator)
    sizes = torch.randint(4, ITEMS + 1, (count, 1), generator=generator)
    asked = (torch.rand(count, QUESTIONS, generator=generator) * sizes).long()
    visible = torch.arange(ITEMS) < sizes
    return Sets(keys, values, visible, keys.gather(1, asked), values.gather(1, asked))


class Encoder(nn.Module):
    """Items that see one another: one pre-norm block of self-attention."""

    def __init__(self, attention: str, width: int, heads: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(KEYS, width), nn.Embedding(VALUES, width)
        self.norm = nn.LayerNorm(width)
        self.attention = ATTENTION[attention](width, heads, 0)

    def forward(self, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Items [B, S] with their visibility [B, S] to [B, S, width]."""
        x = self.keys(keys) + self.values(values)
        return x + self.attention(self.norm(x), mask=visible[:, None, None, :])


class Decoder(nn.Module):
    """Questions that attend to items: cross-attention, feed-forward network, classifier."""

    def __init__(self, attention: str, width: int, heads: int, context_size: int) -> None:
        super().__init__()
        self.keys = nn.Embedding(KEYS, width)
        self.attention = ATTENTION[attention](width, heads, 1, context_size=context_size)
        self.norm, self.context_norm = nn.LayerNorm(width), nn.LayerNorm(context_size)
        self.classifier = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, VALUES),
        )

    def forward(self, questions: Tensor, items: Tensor, visible: Tensor) -> Tensor:
        """Questions [B, T] over items [B, S, context_size] to logits [B, T, VALUES]."""
        x = self.keys(questions)
        mask = visible[:, None, None, :]  # keys alone are masked: a question is never padding
        x = x + self.attention(self.norm(x), self.context_norm(items), mask=mask)
        return self.classifier(x)


class Reader(nn.Module):
    """Encoder with decoder, of different widths."""

    def __init__(
        self, attention: str, *, width: int = 64, context_size: int = 48, heads: int = 4
    ) -> None:
        super().__init__()
        self.encoder = Encoder(attention, context_size, heads)
        self.decoder = Decoder(attention, width, heads, context_size)

    def forward(self, sets: Sets) -> Tensor:
        """Logits [B, QUESTIONS, VALUES]."""
        items = self.encoder(sets.keys, sets.values, sets.visible)
        return self.decoder(sets.questions, items, sets.visible)


def train(
    model: nn.Module, *, steps: int, seed: int, batch: int = 64, learning_rate: float = 5e-3
) -> None:
    """Train on sets that are drawn anew at each step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.2
    )
    for step in range(1, steps + 1):
        sets = draw_sets(batch, generator)
        loss = F.cross_entropy(model(sets).flatten(0, 1), sets.answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"  step {step:4d}  loss {loss.item():.3f}")


@torch.no_grad()
def right_answers(model: nn.Module, sets: Sets) -> int:
    """Number of questions that the model answers rightly."""
    return int((model(sets).argmax(-1) == sets.answers).sum())


def main(argv: list[str] | None = None) -> None:
    """Train with each kind of attention on the same sets; print held-out accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=[*ATTENTION, "all"], default="all")
    parser.add_argument("--steps", type=arguments.steps, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    sets = draw_sets(1000, torch.Generator().manual_seed(options.seed + 1_000_000))
    for name in ATTENTION if options.attention == "all" else [options.attention]:
        torch.manual_seed(options.seed)
        model = Reader(name)
        started = time.process_time()
        train(model, steps=options.steps, seed=options.seed)
        seconds = time.process_time() - started
        right = right_answers(model, sets)
        print(
            f"{name}: {describe(right, sets.answers.numel(), 'held-out questions')}, "
            f"{seconds:.0f} s of processor time"
        )


if __name__ == "__main__":
    main()
