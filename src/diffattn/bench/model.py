"""`diffattn bench model`: training and decoding speed of language models."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffattn.bench import plots, values
from diffattn.bench.accuracy import LIMIT
from diffattn.bench.sides import DTYPES
from diffattn.bench.spread import Spread, ratio, spread
from diffattn.bench.timing import ROUNDS, wrong_sides
from diffattn.bench.work import Record, Results
from diffattn.errors import UserError
from diffattn.evaluation import take_turns, training_rates
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM
from diffattn.report.tables import Figure, Table

KINDS = {"softmax": "Transformer", "v1": "V1", "v2": "V2"}
_BASE = ("softmax", "sdpa")
_SHORTEST = 0.05  # seconds of a turn of decoding
_CHECKED = 48  # tokens
Task = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `diffattn bench model`.

    Args:
        training: "ROWSxTOKENS" of a training step.
        decoding: cached tokens behind which a token is decoded.
        impl: attention implementations as transformers names them; "all" means sdpa and all that
            this package registers.
        width: of the model.
        layers: its blocks.
        heads: of the Transformer; V1 has half of them.
        vocabulary: entries.
        dtype: of the weights, one of DTYPES.
        device: "cpu" or "cuda".
        seconds: for each task; every model has five turns at the least.
    """

    GROWS: ClassVar[tuple[str, ...]] = ("training", "decoding")

    training: tuple[str, ...] = ("4x512", "1x2048")
    decoding: tuple[int, ...] = (1024, 8192)
    impl: tuple[str, ...] = ("all",)
    width: int = 512
    layers: int = 6
    heads: int = 16
    vocabulary: int = 16_000
    dtype: str = "fp32"
    device: str = "cpu"
    seconds: float = 20.0

    def __post_init__(self) -> None:
        values.different("training", self.training)
        values.different("decoding", self.decoding)
        for length in self.decoding:
            values.above_zero("decoding", length)
        for name in ("width", "layers", "heads", "vocabulary", "seconds"):
            values.above_zero(name, getattr(self, name))
        self.tasks()
        values.place(self.dtype, self.device)
        values.different("impl", self.impl)
        if self.impl != ("all",):
            for name in self.impl:
                values.one_of("impl", name, ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()))
        for kind in KINDS:
            try:
                _config(self, kind)
            except ValueError as error:
                raise UserError(f"model: {error}") from error

    def tasks(self) -> Mapping[str, Task]:
        """A task for each training step and each number of cached tokens."""
        found = {}
        for text in self.training:
            rows, length = values.whole_numbers("training", text, "ROWSxTOKENS", "x")
            found[f"training {text}"] = "training", rows, length
        for length in self.decoding:
            found[f"decoding behind {length}"] = "decoding", 1, length
        return found


def implementations(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of attention implementations; "all" means sdpa and those that this package adds."""
    if names != ("all",):
        return names
    ours = [
        name
        for name in ALL_ATTENTION_FUNCTIONS.valid_keys()
        if getattr(ALL_ATTENTION_FUNCTIONS[name], "__module__", "").startswith("diffattn.")
    ]
    return "sdpa", *ours


def measure(settings: Settings, task: Task) -> Record:
    """Check every model, then time those that are right in turns.

    Returns:
        By the models' names: `errors` in units of the Transformer's own with torch's kernel,
        `seconds` of a token in every turn, `parameters`, `left_out`, `wrong`.
    """
    what, rows, length = task
    sides = dict.fromkeys([_BASE, *((k, i) for i in implementations(settings.impl) for k in KINDS)])
    record: Record = {"errors": {}, "seconds": {}, "parameters": {}, "left_out": {}, "wrong": {}}
    models: dict[str, Any] = {}
    unit = None
    for kind, impl in sides:
        name = f"{KINDS[kind]}, {impl}"
        try:
            model = _model(settings, kind, impl)
            error = _error(model, settings.vocabulary)
        except (NotImplementedError, ImportError, ValueError) as reason:
            record["left_out"][name] = str(reason).splitlines()[0]
            continue
        unit = error if unit is None else unit
        if error <= LIMIT * unit:
            record["errors"][name] = error / unit
            record["parameters"][name] = sum(p.numel() for p in model.parameters())
            models[name] = model
        else:  # NaN too
            record["wrong"][name] = (
                f"its error is {error / unit:.3g} times that of the Transformer, expected "
                f"{LIMIT:g} or less"
            )
    ids = torch.randint(settings.vocabulary, (rows, length), device=settings.device)
    listed = list(models.values())
    if what == "training":
        seconds = 1 / training_rates(listed, ids, rounds=ROUNDS, seconds=settings.seconds)
    else:
        seconds = take_turns(
            [_decoding(model, ids) for model in listed],
            rounds=ROUNDS,
            seconds=settings.seconds,
            shortest=_SHORTEST,
        )
    record["seconds"] = dict(zip(models, seconds.tolist(), strict=True))
    return record


def _config(settings: Settings, kind: str) -> DiffTransformerConfig:
    return DiffTransformerConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        attention=kind,
        match_heads=settings.heads,
    )


def _model(settings: Settings, kind: str, impl: str) -> Any:
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(_config(settings, kind))
    model.set_attn_implementation(impl)
    return model.to(device=settings.device, dtype=DTYPES[settings.dtype])  # pyright: ignore


@torch.no_grad()
def _error(model: Any, vocabulary: int) -> float:
    """Distance of logits, the last of them decoded from a cache, to those of the map in fp64."""
    ids = torch.randint(vocabulary, (1, _CHECKED), device=model.device)
    cache = DynamicCache(config=model.config)
    parts = [
        model(input_ids=part, past_key_values=cache, use_cache=True).logits.double()
        for part in (ids[:, :-1], ids[:, -1:])
    ]
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    right = exact(input_ids=ids, use_cache=False).logits
    return ((torch.cat(parts, dim=1) - right).norm() / right.norm()).item()


def _decoding(model: Any, ids: Tensor) -> Callable[[], None]:
    """A function that decodes a token behind cached ones and takes it out of the cache again."""
    model.eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, :1]

    @torch.no_grad()
    def step() -> None:
        model(input_ids=token, past_key_values=cache, use_cache=True)
        cache.crop(-1)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return step


def speeds(record: Record) -> dict[str, tuple[Spread | None, Spread | None]]:
    """Tokens per second over the Transformer's, with torch's kernel and with the same one."""
    times = record["seconds"]
    transformer = KINDS["softmax"]
    found = {}
    for name in times:
        bases = f"{transformer}, sdpa", f"{transformer}, {name.split(', ')[1]}"
        found[name] = tuple(ratio(times[b], times[name]) if b in times else None for b in bases)
    return found


def tables(results: Results) -> list[Table]:
    """A table for each task."""
    found = []
    s = results["settings"]
    for task, record in results["records"].items():
        rows = [
            (
                model,
                f"{record['parameters'][model] / 1e6:.1f} M",
                f"{1 / spread(record['seconds'][model]).middle:,.0f}",
                *("" if one is None else one.text() for one in both),
                f"{record['errors'][model]:.2f}",
            )
            for model, both in speeds(record).items()
        ]
        found.append(
            Table(
                f"{task} tokens, width {s['width']}, {s['layers']} layers, {s['heads']} heads, "
                f"{s['dtype']}, {s['device']}",
                (
                    *("model", "parameters", "tokens/s", "x Transformer, sdpa"),
                    *("x Transformer, same", "error x Transformer's"),
                ),
                rows,
                (
                    *(f"{model} left out: {why}" for model, why in record["left_out"].items()),
                    *(f"{model} is wrong: {why}" for model, why in record["wrong"].items()),
                ),
            )
        )
    return found


def brief(results: Results) -> Table:
    """A row for each task: the fastest attention implementation of every architecture."""
    rows = []
    for task, record in results["records"].items():
        cells = []
        for title in KINDS.values():
            rates = {
                name.split(", ")[1]: 1 / spread(times).middle
                for name, times in record["seconds"].items()
                if name.startswith(f"{title},")
            }
            best = max(rates, key=rates.__getitem__, default=None)
            cells.append(f"{rates[best]:,.0f} ({best})" if best else "")
        rows.append((f"{task} tokens", *cells))
    s = results["settings"]
    return Table(
        f"Tokens/s of models of width {s['width']}, {s['layers']} layers, {s['heads']} heads, "
        f"{s['dtype']}, {s['device']}; the fastest attention implementation of each",
        ("task", *KINDS.values()),
        rows,
    )


def figures(results: Results) -> list[Figure]:
    """A panel for each task."""
    panels = {
        f"{task} tokens": {
            model: both[0] for model, both in speeds(record).items() if both[0] is not None
        }
        for task, record in results["records"].items()
    }
    return [
        Figure(
            "Speed beside the Transformer",
            plots.ranges("speeds", "Tokens per second over the Transformer's", panels, "ratio"),
            "Points are medians over turns, lines the middle half of the turns; right of 1 is "
            "faster than the Transformer with torch's kernel.",
        )
    ]


problems = wrong_sides
