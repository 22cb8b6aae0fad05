"""Base models from local folders: safetensors alone, no remote code, no network."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from diffattn.errors import UserError
from diffattn.models.new_folder import UNFINISHED  # its package registers our architectures too
from diffattn.models.quiet import without_progress_bars


def load_base(folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model of transformers, or of this library, from a folder.

    Args:
        folder: with config.json and safetensors.
        dtype: of the weights in memory; fp32 to train.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: no such folder, no config.json, pickled weights alone, a quantised model, or
            nothing that transformers can load.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError(
            f"model: expected a folder with config.json and safetensors, got {folder}, which is "
            "none; nothing is downloaded by name"
        )
    if not (path / "config.json").is_file():
        adapter = (path / "dex_config.json").is_file()
        held = "an adapter of DEX; name the base model" if adapter else "a folder without it"
        raise UserError(f"model: expected config.json in {folder}, got {held}")
    if (path / UNFINISHED).exists():
        raise UserError(f"model: {folder} is unfinished: what wrote it was stopped; delete it")
    if not any(path.glob("*.safetensors")):
        pickled = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in path.glob(kind))
        held = f"only pickled weights ({pickled[0]}), which are not read" if pickled else "none"
        raise UserError(f"model: expected *.safetensors in {folder}, got {held}")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        quantised = config.get("quantization_config") is not None
    except (ValueError, AttributeError) as error:
        raise UserError(f"model: {path / 'config.json'} is not a configuration") from error
    if quantised:
        raise UserError(
            f"model: {folder} is quantised; dequantise it first (DEX trains and merges W_O)"
        )
    return _from_pretrained(path, dtype)


def _from_pretrained(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # a foreign folder fails in many ways inside the package
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(" :")
        raise UserError(f"model: {path} cannot be loaded: {reason}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"model: {path} lacks {len(missing)} of the tensors that its config.json asks for, "
            f"{missing[0]} among them"
        )
    broken = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if broken:
        raise UserError(
            f"model: {path} has NaN or infinity in {len(broken)} of its tensors, {broken[0]} among "
            "them"
        )
    return model.eval()
