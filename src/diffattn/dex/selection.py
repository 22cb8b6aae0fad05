"""Choose the heads that a differential extension is for."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import torch
from torch import Tensor, nn

from diffattn.dex.adapter import fingerprint
from diffattn.dex.entropy import NAME, EntropyMeter
from diffattn.dex.plan import Criterion, HeadPlan, choose
from diffattn.dex.sites import Site, evaluating, find_sites
from diffattn.errors import UserError


def select_heads(
    model: nn.Module,
    sequences: Iterable[Tensor] = (),
    *,
    criterion: Criterion = "entropy",
    count: int | None = None,
    skip: int = 32,
    first_key: bool = True,
    on_progress: Callable[[int], None] | None = None,
) -> HeadPlan:
    """Choose heads of every layer by what they do on some text.

        entropy:     mean over rows of -sum_j p_j ln p_j, the highest are chosen
        importance:  mean over batches of |dL / d gate_h| at gate 1, the lowest are chosen

    Args:
        model: a causal language model of transformers, before `inject`.
        sequences: token ids, each [B, T]; 64 sequences of the data to adapt to is a good number.
        criterion: "entropy", "importance" or "all" (every head; needs no sequences).
        count: heads of each layer; None means half, rounded down.
        skip: first positions of each sequence that entropy does not count.
        first_key: whether entropy counts the first key, where attention often rests.
        on_progress: called with the number of sequences done.

    Returns:
        The plan; pass `plan.heads` to `DexConfig`.

    Raises:
        UserError: no sequences, sequences not longer than `skip`, a value is unknown, or the
            model's attention cannot be measured.

    Source: Kong et al., arXiv 2505.16333, section 3 (criteria), appendix B.4 (highest entropy).
    Differs: positions, the first key, data and number are not known from the paper.
    """
    if criterion not in get_args(Criterion):
        raise UserError(
            f"criterion: expected one of {', '.join(get_args(Criterion))}, got {criterion!r}"
        )
    if skip < 0:
        raise UserError(f"skip: expected a count from 0, got {skip}")
    sites, options = find_sites(model), {"count": count}
    if criterion == "all":
        heads = {site.layer: list(range(site.num_heads)) for site in sites}
        return HeadPlan(
            criterion=criterion, heads=heads, scores=[], fingerprint=fingerprint(model), options={}
        )
    counted = _Counted(sequences, on_progress, longer_than=skip if criterion == "entropy" else 1)
    if criterion == "entropy":
        options |= {"skip": skip, "first_key": first_key}
        scores = _entropies(model, sites, counted, skip, first_key)
    else:
        scores = _importances(model, sites, counted)
    return HeadPlan(
        criterion=criterion,
        heads=choose(scores, count, highest=criterion == "entropy"),
        scores=scores,
        fingerprint=fingerprint(model),
        options=options | {"sequences": counted.sequences, "tokens": counted.tokens},
    )


class _Counted:
    """Sequences that are checked and counted as they are read."""

    def __init__(
        self,
        sequences: Iterable[Tensor],
        on_progress: Callable[[int], None] | None,
        *,
        longer_than: int,
    ) -> None:
        self.source, self.on_progress, self.longer_than = sequences, on_progress, longer_than
        self.sequences = self.tokens = 0

    def __iter__(self) -> Iterator[Tensor]:
        for ids in self.source:
            if ids.dim() != 2 or ids.shape[1] <= self.longer_than:
                raise UserError(
                    f"sequences: expected [B, T] with T above {self.longer_than}, "
                    f"got {list(ids.shape)}"
                )
            yield ids
            self.sequences += ids.shape[0]
            self.tokens += ids.numel()
            if self.on_progress is not None:
                self.on_progress(self.sequences)
        if not self.sequences:
            raise UserError("sequences: expected at least one, got none")


def _entropies(
    model: Any, sites: list[Site], sequences: Iterable[Tensor], skip: int, first_key: bool
) -> list[list[float]]:
    before = model.config._attn_implementation
    device = next(model.parameters()).device
    with evaluating(model), EntropyMeter(skip=skip, first_key=first_key) as meter:
        model.set_attn_implementation(NAME)
        try:
            with torch.no_grad():
                for ids in sequences:
                    model.base_model(input_ids=ids.to(device), use_cache=False)
                    _check_measured(model, sites, meter)
        finally:
            model.set_attn_implementation(before)
    return [meter.means(site.layer).tolist() for site in sites]


def _check_measured(model: nn.Module, sites: list[Site], meter: EntropyMeter) -> None:
    for site in sites:
        found = len(meter.sums.get(site.layer, ()))
        if found != site.num_heads:
            raise UserError(
                f"criterion: entropy needs one softmax map for each of the {site.num_heads} heads "
                f"of layer {site.layer}, got {found} from the attention interface of "
                f"{type(model).__name__}; choose importance or all"
            )


def _importances(model: Any, sites: list[Site], sequences: Iterable[Tensor]) -> list[list[float]]:
    device = next(model.parameters()).device
    gates = [torch.ones(site.num_heads, device=device, requires_grad=True) for site in sites]
    totals = [torch.zeros(site.num_heads, dtype=torch.float64) for site in sites]
    handles = [
        model.get_submodule(site.projection).register_forward_pre_hook(_Gated(gate, site))
        for site, gate in zip(sites, gates, strict=True)
    ]
    required = [p for p in model.parameters() if p.requires_grad]
    batches = 0
    try:
        with evaluating(model):
            for parameter in required:  # the gates' gradients alone are wanted
                parameter.requires_grad_(False)
            for ids in sequences:
                ids = ids.to(device)
                with torch.enable_grad():
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                gradients = torch.autograd.grad(loss, gates)
                for total, gradient in zip(totals, gradients, strict=True):
                    total += gradient.abs().double().cpu()
                batches += 1
    finally:
        for handle in handles:
            handle.remove()
        for parameter in required:
            parameter.requires_grad_(True)
    return [(total / batches).tolist() for total in totals]


class _Gated:
    """The hook that multiplies each head by its gate."""

    def __init__(self, gate: Tensor, site: Site) -> None:
        self.gate, self.width = gate, site.value_dim

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        heads = args[0].unflatten(-1, (-1, self.width))
        return ((heads * self.gate.to(heads.dtype)[:, None]).flatten(-2), *args[1:])
