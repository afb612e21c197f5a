"""Folders of quantised models, written from known integers the way each tool writes them, with plain loops.

Every `write_*` returns a `Written`: the folder, a float32 model with the values that the integers stand for, and the integers
of each quantised module as the engine should hold them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.passes.architectures import ARCHITECTURES, write_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
INPUT_SCALE = 0.0625
GPT_SIZES: dict[str, Any] = {"n_embd": 64, "n_inner": 160, "n_head": 4}


@dataclass
class Matrix:
    """codes [N, K], scales [N, G], zeros [N, G] or None (numpy); `order` of inputs in which the engine holds the codes."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    order: np.ndarray | None = None

    def values(self, group: int) -> torch.Tensor:
        """float32 [N, K] by the definition, one input at a time."""
        k = self.codes.shape[1]
        held = self.codes if self.order is None else self.codes[:, self.order]
        out = np.zeros(held.shape, np.float32)
        for i in range(k):
            g = i // group if group else 0
            zero = 0 if self.zeros is None else self.zeros[:, g].astype(np.float32)
            out[:, i] = (held[:, i].astype(np.float32) - zero) * self.scales[:, g].astype(np.float32)
        if self.order is None:
            return torch.from_numpy(out)
        stored = np.zeros_like(out)
        stored[:, self.order] = out
        return torch.from_numpy(stored)


@dataclass
class Written:
    path: Path
    model: PreTrainedModel
    matrices: dict[str, Matrix]
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]

    def save(self) -> Path:
        """Write the folder again, after a test has changed tensors or configuration."""
        save_file(self.tensors, self.path / "model.safetensors")
        (self.path / "config.json").write_text(json.dumps(self.config))
        return self.path


def random_matrix(
    n: int, k: int, bits: int, group: int, seed: int, zero_points: bool, low: int = 0
) -> Matrix:
    random = np.random.default_rng(seed)
    groups = -(-k // group) if group else 1
    codes = random.integers(low, low + 2**bits, (n, k))
    scales = random.uniform(0.02, 0.06, (n, groups)).astype(np.float16)
    scales = (scales * (16 / 2**bits)).astype(np.float16)
    zeros = random.integers(1, 2**bits, (n, groups)) if zero_points else None
    return Matrix(codes, scales, zeros)


Pack = Callable[[str, Matrix], dict[str, torch.Tensor]]


def write(
    path: Path,
    arch: str,
    settings: dict[str, Any],
    make: Callable[[int, int, int], Matrix],
    pack: Pack,
    group: int,
    *,
    skip: tuple[str, ...] = ("lm_head",),
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Written:
    """Quantise every linear of a tiny model but `skip`; `make(n, k, seed)` gives integers, `pack` a module's tensors."""
    sizes = GPT_SIZES if arch == "gpt2" else SIZES
    model = ARCHITECTURES[arch](**{**sizes, **changes}).to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(path)
    write_tokenizer(path)
    tensors = dict(model.state_dict())
    if getattr(model.config, "tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    matrices: dict[str, Matrix] = {}
    for seed, (name, module) in enumerate(model.named_modules()):
        turned = isinstance(module, Conv1D)
        if not (turned or type(module) is nn.Linear) or name.endswith(skip):
            continue
        n, k = reversed(module.weight.shape) if turned else module.weight.shape
        matrix = matrices[name] = make(n, k, seed)
        values = matrix.values(group)
        with torch.no_grad():
            model.float()
            module.weight.copy_(values.T if turned else values)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in pack(name, matrix).items()}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = settings
    written = Written(path, model.float(), matrices, {k: v.clone() for k, v in tensors.items()}, config)
    written.save()
    return written


# --- AutoAWQ (awq/modules/linear/gemm.py)


def _awq_words(values: np.ndarray) -> torch.Tensor:
    """[R, N] -> [R, N / 8] int32."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words[:, column] |= values[:, column * 8 + place].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32))


def pack_awq(name: str, matrix: Matrix) -> dict[str, torch.Tensor]:
    assert matrix.zeros is not None
    return {
        "qweight": _awq_words(matrix.codes.T),
        "qzeros": _awq_words(matrix.zeros.T),
        "scales": torch.from_numpy(matrix.scales.T.copy()),
    }


def write_awq(
    path: Path, arch: str = "llama", group: int = 32, skip: tuple[str, ...] = (), **changes: Any
) -> Written:
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(skip) or None,
    }

    def make(n: int, k: int, seed: int) -> Matrix:
        return random_matrix(n, k, 4, group, seed, zero_points=True)

    return write(path, arch, settings, make, pack_awq, group, skip=("lm_head", *skip), **changes)


# --- AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py)


def _gptq_rows(values: np.ndarray, bits: int) -> np.ndarray:
    """[K, N] -> [K / 32 · bits, N] uint32, with AutoGPTQ's own steps for 3 bits."""
    values = values.astype(np.uint32)
    words = np.zeros((values.shape[0] // 32 * bits, values.shape[1]), np.uint32)
    i = row = 0
    while row < len(words):
        if bits != 3:
            for j in range(i, i + 32 // bits):
                words[row] |= values[j] << np.uint32(bits * (j - i))
            i, row = i + 32 // bits, row + 1
            continue
        for j in range(i, i + 10):
            words[row] |= values[j] << np.uint32(3 * (j - i))
        i += 10
        words[row] |= values[i] << np.uint32(30)
        row += 1
        words[row] |= (values[i] >> np.uint32(2)) & np.uint32(1)
        i += 1
        for j in range(i, i + 10):
            words[row] |= values[j] << np.uint32(3 * (j - i) + 1)
        i += 10
        words[row] |= values[i] << np.uint32(31)
        row += 1
        words[row] |= (values[i] >> np.uint32(1)) & np.uint32(3)
        i += 1
        for j in range(i, i + 10):
            words[row] |= values[j] << np.uint32(3 * (j - i) + 2)
        i, row = i + 10, row + 1
    return words


def pack_gptq(bits: int, group: int, version: int = 1, borrows: bool = False) -> Pack:
    def pack(name: str, matrix: Matrix) -> dict[str, torch.Tensor]:
        assert matrix.zeros is not None
        zeros = matrix.zeros.T
        if version == 1 and not borrows:
            zeros = zeros - 1
        words = _gptq_rows(zeros.T, bits).T.copy()
        if version == 1 and borrows:
            words = words - np.uint32({2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits])
        k = matrix.codes.shape[1]
        group_of = np.arange(k) // (group or k)
        if matrix.order is not None:
            group_of = np.empty(k, np.int64)
            group_of[matrix.order] = np.arange(k) // (group or k)
        return {
            "qweight": torch.from_numpy(_gptq_rows(matrix.codes.T, bits).view(np.int32)),
            "qzeros": torch.from_numpy(words.view(np.int32)),
            "scales": torch.from_numpy(matrix.scales.T.copy()),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }

    return pack


def write_gptq(
    path: Path,
    arch: str = "llama",
    bits: int = 4,
    group: int = 32,
    version: int = 1,
    desc_act: bool = False,
    borrows: bool = False,
    **changes: Any,
) -> Written:
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": desc_act,
        "sym": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    if borrows:
        settings["meta"] = {"quantizer": ["gptqmodel:5.6.0"]}

    def make(n: int, k: int, seed: int) -> Matrix:
        matrix = random_matrix(n, k, bits, group, seed, zero_points=True)
        assert matrix.zeros is not None
        if version == 2 or borrows:
            matrix.zeros[:, 0] = 0  # what v1 cannot say without a borrow
        if desc_act and group:
            # q, k and v see one activation, so GPTQ orders their inputs alike; the others have their own.
            matrix.order = _grouped_order(k, group, k if n <= 64 else n)
        return matrix

    return write(path, arch, settings, make, pack_gptq(bits, group, version, borrows), group, **changes)


def _grouped_order(k: int, group: int, seed: int) -> np.ndarray:
    """An order of inputs whose groups hold ascending inputs: what sorting by group gives."""
    shuffled = np.random.default_rng(seed).permutation(k)
    return np.concatenate([np.sort(shuffled[i : i + group]) for i in range(0, k, group)])


# --- bitsandbytes (nn/modules.py)


def write_bitsandbytes(path: Path, arch: str = "llama", **changes: Any) -> Written:
    def make(n: int, k: int, seed: int) -> Matrix:
        random = np.random.default_rng(seed)
        maxima = random.uniform(0.2, 0.6, (n, 1)).astype(np.float32)
        matrix = Matrix(random.integers(-127, 128, (n, k)), maxima / np.float32(127), None)
        made[id(matrix)] = maxima
        return matrix

    def pack(name: str, matrix: Matrix) -> dict[str, torch.Tensor]:
        return {
            "weight": torch.from_numpy(matrix.codes.astype(np.int8)),
            "SCB": torch.from_numpy(made[id(matrix)][:, 0].copy()),
            "weight_format": torch.zeros((), dtype=torch.uint8),
        }

    made: dict[int, np.ndarray] = {}
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    return write(path, arch, settings, make, pack, 0, **changes)


# --- compressed-tensors (compressors/pack_quantized/helpers.py)


def _stream_words(values: np.ndarray, bits: int) -> np.ndarray:
    """[R, K] of codes 0 … 2^bits - 1 -> [R, ceil(K · bits / 32)] int32, bit after bit."""
    rows, count = values.shape
    words = np.zeros((rows, -(-count * bits // 32)), np.uint32)
    for i in range(count):
        for bit in range(bits):
            place = i * bits + bit
            words[:, place // 32] |= ((values[:, i] >> bit) & 1).astype(np.uint32) << np.uint32(place % 32)
    return words.view(np.int32)


def write_packed(
    path: Path,
    arch: str = "llama",
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    g_idx: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    ignore: tuple[str, ...] = ("lm_head",),
    inputs: dict[str, Any] | None = None,
    **changes: Any,
) -> Written:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
        "actorder": "group" if g_idx else None,
    }
    settings = _compressed("pack-quantized", weights, inputs, ignore)
    middle = 2 ** (bits - 1)

    def make(n: int, k: int, seed: int) -> Matrix:
        matrix = random_matrix(n, k, bits, group, seed, zero_points=not symmetric)
        if symmetric:
            matrix.zeros = np.full(matrix.scales.shape, middle)
        scales = torch.from_numpy(matrix.scales).to(scale_dtype)
        matrix.scales = scales.float().numpy()
        if g_idx:
            matrix.order = _grouped_order(k, group, k if n <= 64 else n)
        return matrix

    def pack(name: str, matrix: Matrix) -> dict[str, torch.Tensor]:
        n, k = matrix.codes.shape
        tensors = {
            "weight_packed": torch.from_numpy(_stream_words(matrix.codes, bits)),
            "weight_scale": torch.from_numpy(matrix.scales).to(scale_dtype),
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            assert matrix.zeros is not None
            tensors["weight_zero_point"] = torch.from_numpy(_stream_words(matrix.zeros.T, bits).T.copy())
        if matrix.order is not None:
            group_of = np.empty(k, np.int32)
            group_of[matrix.order] = np.arange(k) // group
            tensors["weight_g_idx"] = torch.from_numpy(group_of)
        return tensors

    return write(path, arch, settings, make, pack, group, **changes)


def write_w8a8(
    path: Path,
    arch: str = "llama",
    strategy: str = "channel",
    static: bool = False,
    fp8: bool = False,
    ignore: tuple[str, ...] = ("lm_head",),
    **changes: Any,
) -> Written:
    kind = "float" if fp8 else "int"
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": not static}
    inputs["strategy"] = "tensor" if static else "token"
    settings = _compressed("float-quantized" if fp8 else "int-quantized", weights, inputs, ignore)

    def make(n: int, k: int, seed: int) -> Matrix:
        random = np.random.default_rng(seed)
        rows = 1 if strategy == "tensor" else n
        scales = random.uniform(0.001, 0.004, (rows, 1)).astype(np.float32)
        codes = random.integers(-128, 128, (n, k)).astype(np.float32)
        if fp8:
            codes = torch.from_numpy(codes).to(torch.float8_e4m3fn).float().numpy()
        return Matrix(codes, np.broadcast_to(scales, (n, 1)), None)

    def pack(name: str, matrix: Matrix) -> dict[str, torch.Tensor]:
        codes = torch.from_numpy(matrix.codes)
        scales = torch.from_numpy(matrix.scales.copy())
        tensors = {
            "weight": codes.to(torch.float8_e4m3fn if fp8 else torch.int8),
            "weight_scale": scales[:1, 0] if strategy == "tensor" else scales,
        }
        if static:
            tensors["input_scale"] = torch.tensor([INPUT_SCALE])
        return tensors

    return write(path, arch, settings, make, pack, 0, **changes)


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
