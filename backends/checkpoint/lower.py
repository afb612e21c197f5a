"""From a quantised Program to a Hugging Face folder: config.json, generation_config.json and safetensors.

1. A quantised linear becomes its module's packed tensors (schemes.py, after compressed-tensors 0.20:
   compressors/pack_quantized/helpers.py and naive_quantized/base.py).
2. Every other tensor of transformers' model is written as the Program has it. A norm whose weight stands for 1 + w in the
   model, and which smoothing made a plain factor, is written with 1 taken off again.
3. A tied head stays tied where table and head are plain; else both are written, and the configuration unties them.
4. The configuration says float32, so that transformers reads scales and bf16 tensors without rounding them.

Shards are planned from shapes, then filled and written one at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from enginewright.backends.artifact import canonical_json
from enginewright.backends.base import LowerProgress
from enginewright.backends.checkpoint.schemes import MIXED_ZERO_POINTS, Scheme, objection, scheme_of, settings
from enginewright.passes.bit_packing import pack_words, words
from enginewright.passes.dialect import OPS
from enginewright.passes.kept import KeptWeight
from enginewright.passes.matching import argument, is_call
from enginewright.passes.meta_model import build_on_meta
from enginewright.passes.program import Program, Stage
from enginewright.passes.source import ModelSource
from enginewright.passes.weights import Weight, transposed
from enginewright.recipes.errors import LoweringError
from enginewright.recipes.formats import parse_weight

__all__ = ["lower"]

_SHARD_BYTES = 1 << 30
_QUANTISED = ("quantised_linear", "quantised_embedding", "quantised_moe")
_MATRIX = re.compile(r"\.[^.]+(\.kept)?\.codes$")  # what the pass `quantise` adds to a matrix's name
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Entry:
    """One tensor of the folder, not loaded yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def lower(
    program: Program, directory: Path, progress: LowerProgress | None, source: ModelSource
) -> list[str]:
    """Write the folder's files into `directory`; returns their names. Raises LoweringError for what it cannot say."""
    if program.stage != Stage.QUANTISED:
        raise LoweringError(
            "only a quantised program can be written as a checkpoint",
            found=program.stage.name,
            expected=Stage.QUANTISED.name,
        )
    model = build_on_meta(source.config)
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    quantised = _quantised(program, state)
    schemes = _schemes(program, quantised)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    apart = any(f"{name}.weight" in (*tied, *tied.values()) for name in quantised)
    entries: dict[str, Entry] = {}
    for name, node in quantised.items():
        entries.update(_packed(program, name, node, schemes[name]))
    plain = _plain(program, source, model, state)
    for name in state:
        if name.removesuffix(".weight") not in quantised and (apart or name not in tied):
            entries[name] = plain[name]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = _config(source, settings(schemes, linears) if schemes else None, untied=apart)
    names = _write_shards(entries, directory, progress)
    (directory / "config.json").write_bytes(canonical_json(config))
    if source.generation_config:
        (directory / "generation_config.json").write_bytes(canonical_json(source.generation_config))
        names.append("generation_config.json")
    return [*names, "config.json"]


def _config(source: ModelSource, quantisation: dict[str, Any] | None, untied: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(source.config.to_json_string(use_diff=True))
    for key in ("quantization_config", "_name_or_path", "torch_dtype"):
        config.pop(key, None)
    config["architectures"] = [type(build_on_meta(source.config)).__name__]
    config["dtype"] = "float32"
    if untied:
        config["tie_word_embeddings"] = False
    if quantisation is not None:
        config["quantization_config"] = quantisation
    return config


# Quantised modules.


def _quantised(program: Program, state: Mapping[str, Any]) -> dict[str, fx.Node]:
    """Module -> the node that multiplies by its stored codes; bf16 and f32 matrices are plain."""
    found: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if is_call(node, OPS["quantised_moe"]) and parse_weight(argument(node, "weight_format")).has_scales:
            raise _fail(node, "experts in a quantised format")
        if not is_call(node, OPS["quantised_linear"], OPS["quantised_embedding"]):
            continue
        form, module = parse_weight(argument(node, "weight_format")), str(node.meta.get("module", ""))
        if not form.has_scales:
            continue
        codes = program.weight_of(argument(node, "codes"))
        reason = objection(form, codes.shape[-1])
        if is_call(node, OPS["quantised_embedding"]):
            reason = "a packed embedding, which transformers does not read"
        elif state.get(f"{module}.weight") != codes.shape:
            reason = "a matrix that is no module's own weight"
        elif module in found and argument(found[module], "codes") is not argument(node, "codes"):
            reason = "a module with several matrices"
        elif is_call(node, OPS["quantised_linear"]) and argument(node, "outlier_columns") is not None:
            reason = "columns of outliers in another format"
        if reason is not None:
            raise _fail(node, reason)
        found[module] = node
    return found


def _fail(node: fx.Node, reason: str) -> LoweringError:
    return LoweringError(
        f"{node.meta.get('module') or node.name} cannot be written as a checkpoint",
        found=reason,
        expected="linears as transformers has them, in the formats of backends/checkpoint/schemes.py",
    )


def _schemes(program: Program, quantised: Mapping[str, fx.Node]) -> dict[str, Scheme]:
    """Module -> how it is written."""
    found: dict[str, Scheme] = {}
    for name, node in quantised.items():
        activation = argument(node, "activation_format")
        form = parse_weight(argument(node, "weight_format"))
        middle = form.kind == "zero" and _is_centred(program.weight_of(argument(node, "offsets")), form.bits)
        scheme = scheme_of(form, activation, middle)
        assert scheme is not None
        found[name] = scheme
    lone = next((name for name, scheme in found.items() if not scheme.symmetric), None)
    if lone is not None and len(set(found.values())) > 1:
        raise _fail(quantised[lone], MIXED_ZERO_POINTS)
    return found


def _is_centred(zeros: Weight, bits: int) -> bool:
    """Whether all zero points are the middle code. What is still to be rounded is not, unless the recipe says symmetric."""
    owner = getattr(zeros, "owner", None)
    if not isinstance(owner, KeptWeight):
        return bool(getattr(owner, "symmetric", False))
    return bool((zeros.load() == 2.0 ** (bits - 1)).all())


def _packed(program: Program, name: str, node: fx.Node, scheme: Scheme) -> dict[str, Entry]:
    """A module's tensors."""
    codes, scales = (program.weight_of(argument(node, part)) for part in ("codes", "scales"))
    (n, k), groups = codes.shape, scales.shape[-1]
    entries = {"weight_scale": Entry((n, groups), torch.float32, lambda: scales.load().float())}
    if scheme.layout == "packed":
        entries["weight_packed"] = Entry(
            (n, words(k, scheme.bits)), torch.int32, lambda: pack_words(_unsigned(codes.load()), scheme.bits)
        )
        entries["weight_shape"] = Entry((2,), torch.int64, lambda: torch.tensor([n, k]))
        if not scheme.symmetric:
            zeros = program.weight_of(argument(node, "offsets"))
            entries["weight_zero_point"] = Entry(
                (words(n, scheme.bits), groups),
                torch.int32,
                lambda: (
                    pack_words(_zero_points(zeros.load(), scheme.bits, name).T.contiguous(), scheme.bits).T
                ),
            )
    else:
        dtype = torch.float8_e4m3fn if scheme.layout == "fp8" else torch.int8
        entries["weight"] = Entry((n, k), dtype, codes.load)
    if scheme.inputs == "int8_static":
        entries["input_scale"] = Entry(
            (1,), torch.float32, lambda: torch.tensor([argument(node, "activation_scale")])
        )
    return {f"{name}.{part}": entry for part, entry in entries.items()}


def _unsigned(codes: Tensor) -> Tensor:
    """As the package packs them: signed codes with 128 added; ours without a sign are there already."""
    return (codes.short() + 128).to(torch.uint8) if codes.dtype == torch.int8 else codes


def _zero_points(zeros: Tensor, bits: int, name: str) -> Tensor:
    whole = zeros.round()
    if not torch.equal(whole, zeros) or bool((zeros < 0).any()) or bool((zeros >= 2**bits).any()):
        raise LoweringError(
            f"{name} cannot be written as a checkpoint",
            found=f"zero points from {float(zeros.min()):g} to {float(zeros.max()):g}",
            expected=f"whole numbers from 0 to {2**bits - 1}",
        )
    return whole.to(torch.uint8)


# Plain tensors.


def _plain(
    program: Program, source: ModelSource, model: nn.Module, state: Mapping[str, tuple[int, ...]]
) -> dict[str, Entry]:
    """Every tensor of the model's state dict: as the Program has it, else (the graph does not use it) as the source has."""
    bound, _ = source.bind(model)
    canonical: dict[int, str] = {}
    for name, weight in bound.items():
        canonical.setdefault(id(weight), name)
    added = [name for name in program.weights if ".smoothing" in name]
    if added:
        raise LoweringError(
            f"{added[0].partition('.smoothing')[0]} cannot be written as a checkpoint",
            found="smoothing that multiplies an activation, for which transformers' model has no place",
            expected="scales that fold into a norm or a matrix",
            action="build without explicit smoothing",
        )
    offsets, stored = _norm_offsets(program), _plain_codes(program)
    turned = {f"{path}.weight" for path, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    entries: dict[str, Entry] = {}
    for name, shape in state.items():
        own = bound.get(name)
        here = canonical.get(id(own), name)
        now = stored.get(name) or stored.get(here) or program.weights.get(here)
        if now is not None and name in turned:
            now = transposed(now)
        chosen = own if now is None or now.shape != shape else now
        if chosen is None:
            raise LoweringError(
                f"{name} of transformers' model is not in the graph", expected=f"shape {list(shape)}"
            )
        entries[name] = _plain_entry(chosen, offsets.get(here, 0.0))
    return entries


def _plain_codes(program: Program) -> dict[str, Weight]:
    """Weight name -> the values of a matrix in bf16, which a quantised node holds as its codes."""
    found = {}
    for node in program.graph.nodes:
        if not is_call(node, *(OPS[name] for name in _QUANTISED)):
            continue
        if parse_weight(argument(node, "weight_format")).has_scales:
            continue
        for part in ("gate_up_codes", "down_codes") if is_call(node, OPS["quantised_moe"]) else ("codes",):
            codes = argument(node, part)
            found[_MATRIX.sub("", str(codes.target))] = program.weight_of(codes)
    return found


def _plain_entry(weight: Weight, offset: float) -> Entry:
    dtype = weight.dtype if weight.dtype in _DTYPES and not offset else torch.float32
    if not weight.dtype.is_floating_point:
        dtype = weight.dtype

    def load() -> Tensor:
        value = weight.load()
        return (value.float() - offset if offset else value).to(dtype)

    return Entry(weight.shape, dtype, load)


def _norm_offsets(program: Program) -> dict[str, float]:
    """Norm weight -> what the model adds to it and the Program no longer does (smoothing folds the 1 of 1 + w)."""
    found = {}
    for node in program.graph.nodes:
        if is_call(node, OPS["rms_norm"], OPS["add_rms_norm"]):
            weight = argument(node, "weight")
            if isinstance(weight, fx.Node) and argument(node, "weight_offset") == 0.0:
                found[str(weight.target)] = _folded_offset(program.weight_of(weight))
    return {name: offset for name, offset in found.items() if offset}


def _folded_offset(weight: Weight) -> float:
    while weight.sources:
        offset = float(getattr(weight, "offset", 0.0))
        if offset:
            return offset
        weight = weight.sources[0]
    return 0.0


# Files.


def _write_shards(entries: Mapping[str, Entry], directory: Path, progress: LowerProgress | None) -> list[str]:
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(entries):
        if shards[-1] and size + entries[name].nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entries[name].nbytes
    total, done = sum(entry.nbytes for entry in entries.values()), 0
    files = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for file, names in zip(files, shards, strict=True):
        tensors = {}
        for name in names:
            if progress is not None:
                progress(name, done, total)
            tensors[name] = entries[name].load().contiguous().clone()
            done += entries[name].nbytes
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if progress is not None:
        progress("", done, total)
    if len(files) == 1:
        return files
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    (directory / "model.safetensors.index.json").write_bytes(canonical_json(index))
    return [*files, "model.safetensors.index.json"]
