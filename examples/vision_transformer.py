"""A small vision transformer whose attention is chosen by one argument.

Which of four outlines (circle, square, triangle, cross) is in the image? Place, size, angle and
brightness are random; strokes of random direction and pixel noise are in the way. All images are
drawn from the seed; nothing is downloaded.

    python examples/vision_transformer.py
    python examples/vision_transformer.py --attention v1 --save-map maps.png
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import arguments
import torch
import torch.nn.functional as F
from accuracy import describe
from torch import Tensor, nn

from diffattn import DiffAttention, SoftmaxAttention, diff_attention_maps
from diffattn.errors import UserError, needs_extra
from diffattn.ops import split_stripes, subtract_maps

SHAPES = ("circle", "square", "triangle", "cross")
SIDE, PATCH = 24, 4

ATTENTION: dict[str, Callable[..., nn.Module]] = {
    "softmax": lambda width, heads, layer_idx: SoftmaxAttention(
        width, num_heads=heads, causal=False
    ),
    "v1": lambda width, heads, layer_idx: DiffAttention.v1(
        width, match_heads=heads, layer_idx=layer_idx, causal=False
    ),
    "v2": lambda width, heads, layer_idx: DiffAttention.v2(width, match_heads=heads, causal=False),
}


def draw_images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [count, 1, SIDE, SIDE] and which shape [count] each shows."""

    def uniform(low: float, high: float, *sizes: int) -> Tensor:
        drawn = torch.rand(count, *sizes, 1, 1, generator=generator)
        return low + (high - low) * drawn

    def turned(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()

    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    labels = torch.randint(len(SHAPES), (count,), generator=generator)

    radius, margin = uniform(5, 8), 7
    u, v = turned(
        (x - uniform(margin, SIDE - margin)) / radius,
        (y - uniform(margin, SIDE - margin)) / radius,
        uniform(-0.1, 0.1),
    )
    # distance to the outline in units of the radius, negative inside
    u_wide, v_wide = u.abs() - 1, v.abs() - 1
    u_thin, v_thin = u.abs() - 1 / 3, v.abs() - 1 / 3
    sides = [turned(u, v, torch.tensor(math.pi * (0.5 + 2 * i / 3)))[0] for i in range(3)]
    distance = torch.stack(
        [
            torch.hypot(u, v) - 0.8,
            torch.maximum(u.abs(), v.abs()) - 0.7,
            torch.stack(sides).amax(0) - 0.55,
            torch.minimum(torch.maximum(u_wide, v_thin), torch.maximum(u_thin, v_wide)),
        ],
        dim=1,
    )[torch.arange(count), labels]
    shape = (distance.abs() * radius < 0.8) * uniform(0.7, 1.3)

    strokes = 2
    along, across = turned(
        x - uniform(0, SIDE, strokes), y - uniform(0, SIDE, strokes), uniform(0, math.pi, strokes)
    )
    inside = (along.abs() < uniform(3, 6, strokes)) & (across.abs() < 0.8)
    stroke = (inside * uniform(0.7, 1.3, strokes)).amax(1)

    noise = torch.randn(count, SIDE, SIDE, generator=generator)
    pixels = torch.maximum(shape, stroke) + 0.2 * noise
    return 2.5 * pixels.unsqueeze(1), labels  # of about unit variance


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a feed-forward network."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), attention
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T, width] to tokens."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(x)


class VisionTransformer(nn.Module):
    """Patches with learned positions, bidirectional blocks, mean pooling, one linear classifier."""

    def __init__(self, attention: str, *, width: int = 48, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, width))
        self.blocks = nn.Sequential(
            *(Block(width, ATTENTION[attention](width, heads, index)) for index in range(depth))
        )
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, len(SHAPES))

    def tokens(self, images: Tensor) -> Tensor:
        """Patches with their positions, [B, T, width]."""
        return self.patches(images).flatten(2).transpose(1, 2) + self.positions

    def classify(self, tokens: Tensor) -> Tensor:
        """Logits [B, shapes]; the order of the tokens does not matter."""
        return self.classifier(self.norm(self.blocks(tokens)).mean(1))

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 1, SIDE, SIDE] to logits [B, shapes]."""
        return self.classify(self.tokens(images))


def train(
    model: nn.Module, *, steps: int, seed: int, batch: int = 64, learning_rate: float = 5e-3
) -> None:
    """Train on images that are drawn anew at each step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.2
    )
    model.train()
    for step in range(1, steps + 1):
        images, labels = draw_images(batch, generator)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  step {step:4d}  loss {loss.item():.3f}")


@torch.no_grad()
def held_out(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Number of images that the model names rightly."""
    model.eval()
    return sum(
        int((model(some).argmax(-1) == names).sum())
        for some, names in zip(images.split(250), labels.split(250), strict=True)
    )


@torch.no_grad()
def attention_maps(model: VisionTransformer, image: Tensor) -> dict[str, Tensor]:
    """The last layer's maps of one image [1, SIDE, SIDE], each [heads, T, T]."""
    *before, last = model.blocks
    x = model.tokens(image[None])
    for block in before:
        x = block(x)
    x, layer = last.attention_norm(x), last.attention
    q, k = layer.queries(x, None), layer.keys(x, None)
    if isinstance(layer, SoftmaxAttention):
        scores = torch.einsum("bthd,bshd->bhts", q, k) * layer.scaling
        return {"softmax": scores.softmax(-1)[0]}
    q, q_noise = split_stripes(q, layer.sizes.ratio)
    k, k_noise = split_stripes(k, 1) if layer.own_noise_key else (k, None)
    signal, noise = diff_attention_maps(q, k, q_noise, k_noise)
    difference = subtract_maps(signal, noise, layer.lam(x))
    return {"signal": signal[0], "noise": noise[0], "signal - lam noise": difference[0]}


def save_maps(path: Path, model: VisionTransformer, image: Tensor) -> None:
    """Draw, for each head of the last layer, how much each patch counts in the pooled output.

    That is the mean over queries of the map, because the output is the mean over tokens.
    """
    from matplotlib.figure import Figure

    maps = attention_maps(model, image)
    heads = len(next(iter(maps.values())))
    columns = 1 + len(maps)
    figure = Figure(figsize=(2.6 * columns, 2.3 * heads), layout="constrained")
    axes = figure.subplots(heads, columns, squeeze=False)
    for head in range(heads):
        axes[head, 0].imshow(image[0], cmap="gray")
        axes[head, 0].set_ylabel(f"head {head}")
        for axis, (name, weights) in zip(axes[head, 1:], maps.items(), strict=True):
            grid = weights[head].mean(0).unflatten(0, (SIDE // PATCH, -1))
            limit = grid.abs().max().item()
            signed = name == "signal - lam noise"
            drawn = axis.imshow(
                grid,
                cmap="RdBu_r" if signed else "Blues",
                vmin=-limit if signed else 0.0,
                vmax=limit,
            )
            axis.set_title(name if head == 0 else "")
            figure.colorbar(drawn, ax=axis)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Train with each kind of attention on the same images; print held-out accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=[*ATTENTION, "all"], default="all")
    parser.add_argument("--steps", type=arguments.steps, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save-map", type=arguments.new_file, metavar="FILE.png", help="draw the maps of one image"
    )
    options = parser.parse_args(argv)
    if options.save_map:
        if options.attention == "all":
            parser.error("--save-map: draws one model, name it with --attention")
        try:
            with needs_extra("--save-map", "plot"):
                from matplotlib.figure import Figure
        except UserError as error:
            parser.error(str(error))
        kinds = Figure().canvas.get_supported_filetypes()
        if options.save_map.suffix[1:].lower() not in kinds:
            parser.error(
                f"--save-map: expected a picture (.{', .'.join(sorted(kinds))}), got "
                f"{options.save_map.name!r}"
            )

    images, labels = draw_images(2000, torch.Generator().manual_seed(options.seed + 1_000_000))
    for name in ATTENTION if options.attention == "all" else [options.attention]:
        torch.manual_seed(options.seed)
        model = VisionTransformer(name)
        started = time.process_time()
        train(model, steps=options.steps, seed=options.seed)
        seconds = time.process_time() - started
        right = held_out(model, images, labels)
        print(
            f"{name}: {describe(right, len(labels), 'held-out images')}, "
            f"{seconds:.0f} s of processor time"
        )
        if options.save_map:
            save_maps(options.save_map, model, images[0])


if __name__ == "__main__":
    main()
