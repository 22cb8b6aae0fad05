"""Adapters on disk: `dex_config.json` and `dex_model.safetensors`."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffattn.dex.adapter import (
    EXTENSION,
    adapter_of,
    fingerprint,
    inject,
    levels_of,
    set_step,
)
from diffattn.dex.config import DexConfig
from diffattn.errors import UserError

CONFIG, TENSORS = "dex_config.json", "dex_model.safetensors"
_FORMAT = 1


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What an adapter is made of: W_K, W_V, W_O where they train, and the extension."""
    adapter = adapter_of(model)
    names = {*adapter.originals}
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name in names or f".{EXTENSION}." in name
    }


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the adapter of a model.

    Args:
        model: one with DEX injected and not merged.
        folder: gets `dex_config.json` (settings, step of the schedule, fingerprint of the base)
            and `dex_model.safetensors`; an adapter that lies there is replaced.

    Raises:
        UserError: the model has no DEX, or it is merged.
    """
    adapter = adapter_of(model)
    if adapter.unmerged is not None:
        raise UserError("model: expected one that is not merged; call unmerge, or save_pretrained")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.cpu().contiguous() for n, t in adapter_tensors(model).items()}
    partial = target / f".{TENSORS}.{os.getpid()}"
    save_file(tensors, partial, metadata={"format": "pt"})
    described = {
        "format": _FORMAT,
        "base": {
            "name": getattr(getattr(model, "config", None), "_name_or_path", "") or "",
            "class": type(model).__name__,
            "fingerprint": adapter.fingerprint,
            "levels": adapter.levels,
        },
        "step": adapter.step,
        "sha256": hashlib.sha256(partial.read_bytes()).hexdigest(),
        "config": adapter.config.to_dict(),
    }
    text = json.dumps(described, indent=1) + "\n"
    written = target / f".{CONFIG}.{os.getpid()}"
    written.write_text(text, encoding="utf-8")
    os.replace(partial, target / TENSORS)
    os.replace(written, target / CONFIG)


def read_description(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of `dex_config.json`.

    Raises:
        UserError: the folder holds no adapter, or one that cannot be read.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise UserError(f"adapter: expected a folder with {CONFIG}, got {folder}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        config = DexConfig.from_dict(found["config"])
        texts = found["base"]["fingerprint"], found["sha256"]
        complete = found["format"] == _FORMAT and isinstance(found["step"], int) and all(texts)
    except UserError as error:
        raise UserError(f"adapter: {path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"adapter: {path} is not a description of an adapter") from error
    if not complete:
        raise UserError(f"adapter: {path}: expected format {_FORMAT}, got {found['format']!r}")
    return {**found, "config": config}


def load(model: nn.Module, folder: str | os.PathLike[str], *, trainable: bool = False) -> nn.Module:
    """Inject a saved adapter into its base model.

    Args:
        model: the base model, as it was before `inject`.
        folder: where `save` wrote.
        trainable: whether training goes on; needs fp32 weights.

    Returns:
        The model.

    Raises:
        UserError: the folder holds no adapter, a damaged one, or one of another base.
    """
    found = read_description(folder)
    mark = fingerprint(model)
    if found["base"]["fingerprint"] != mark:
        raise UserError(
            f"model: expected the base of the adapter in {folder} ({found['base'].get('class')}, "
            f"fingerprint {found['base']['fingerprint']}), got a {type(model).__name__} with other "
            f"names or shapes of parameters ({mark})"
        )
    _check_levels(model, folder, found["base"].get("levels"))
    tensors = _read_tensors(Path(folder) / TENSORS, found["sha256"])
    inject(model, found["config"], trainable=trainable)
    _fill(model, folder, tensors, found["step"])
    return model


def _check_levels(
    model: nn.Module, folder: str | os.PathLike[str], levels: list[float] | None
) -> None:
    if levels is None:  # of an adapter from before they were kept
        return
    own = levels_of(model)
    far = [
        name
        for (name, _), was, now in zip(model.named_parameters(), levels, own, strict=True)
        if abs(was - now) > 0.05 * max(was, now)
    ]
    if far:
        raise UserError(
            f"model: expected the weights that the adapter in {folder} was trained on, got others "
            f"in {len(far)} tensors, {far[0]} among them"
        )


def read_into(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Set an injected model to a saved adapter of the same settings.

    Raises:
        UserError: the folder holds no adapter, a damaged one, or one of other settings.
    """
    found = read_description(folder)
    if found["config"] != adapter_of(model).config:
        raise UserError(f"adapter: {folder} was made with other settings of DEX")
    _fill(model, folder, _read_tensors(Path(folder) / TENSORS, found["sha256"]), found["step"])


def _fill(
    model: nn.Module, folder: str | os.PathLike[str], tensors: dict[str, Tensor], step: int
) -> None:
    expected = adapter_tensors(model)
    if set(expected) != set(tensors) or any(
        tensors[name].shape != tensor.shape for name, tensor in expected.items()
    ):
        raise UserError(f"adapter: {folder} does not hold the tensors that {CONFIG} describes")
    with torch.no_grad():
        for name, tensor in tensors.items():
            model.get_parameter(name).copy_(tensor)
    set_step(model, step)


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise UserError(f"adapter: {path} is damaged: it is not the file that {CONFIG} names")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"adapter: {path} cannot be read: {error}") from error
