"""A GGUF file as a source of weights: transformers' configuration and names, tensors mapped and dequantised when asked.

1. The header is read here, and every offset checked against the file's size. The configuration, the tokenizer, the
   tensors' names and the rearrangements that llama.cpp's converter made are transformers' own.
2. A matrix whose rows transformers only moves (llama's q and k) keeps its stored integers with the rows moved; one that
   it transposes (GPT-2) becomes a transposed expression; stacked experts become a concatenation. Everything else is
   dequantised and goes through transformers' processor.
3. What transformers drops and the model needs (scaled rotary frequencies) is restored, or refused by name.

| stored as      | kept as                    | else             |
|----------------|----------------------------|------------------|
| Q4_0           | int4_g32, offset = -8 · d  |                  |
| Q4_1           | int4_g32, offset = m       |                  |
| Q8_0           | int8_g32                   |                  |
| Q4_K           | int4_g32, scales to f16    |                  |
| F32, BF16      | f32, bf16                  |                  |
| F16            |                            | bf16             |
| all the others |                            | int8_g32         |

Source of the block layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
import unittest.mock
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import Q4_K
from gguf.quants import dequantize as gguf_dequantize

from enginewright.passes.kept import Held, Parts
from enginewright.passes.weight_names import check_bound, tie
from enginewright.passes.weights import Weight, concatenated, transposed
from enginewright.recipes.errors import EnginewrightError, InputError
from enginewright.recipes.formats import parse_weight

__all__ = ["Entry", "GgufFile", "GgufSource", "GgufTensor"]

_SCALARS = dict(enumerate(["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "", "", "<Q", "<q", "<d"]))
_STRING, _ARRAY = 8, 9
_HELD = {
    "Q4_0": Held("Q4_0", "int4_g32", kept=True),
    "Q4_1": Held("Q4_1", "int4_g32", kept=True),
    "Q4_K": Held("Q4_K", "int4_g32", kept=True, exact=False),
    "Q8_0": Held("Q8_0", "int8_g32", kept=True),
    "F32": Held("F32", "f32", kept=True),
    "F64": Held("F64", "f32", kept=False),
    "BF16": Held("BF16", "bf16", kept=True),
    "F16": Held("F16", "bf16", kept=False),
}
_EXPERTS = re.compile(r"\.ffn_(gate|up|down)_exps\.weight$")
_AGAIN = "copy or download the file again"


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: NumPy shape (outermost first), type, and where its bytes lie."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    nbytes: int

    @property
    def held(self) -> Held:
        return _HELD.get(self.kind.name, Held(self.kind.name, "int8_g32", kept=False))


class GgufFile:
    """A GGUF file, its header read and its size checked. `fields` holds the scalars of the metadata."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data: np.ndarray = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read", found=str(error), action=_AGAIN) from error
        self.fields: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise InputError(
                f"{path} is truncated or damaged: its header does not end", action=_AGAIN
            ) from error
        needed = max((entry.start + entry.nbytes for entry in self.entries.values()), default=0)
        if needed > len(self.data):
            raise InputError(
                f"{path} is truncated",
                found=f"{len(self.data)} bytes",
                expected=f"{needed} bytes",
                action=_AGAIN,
            )

    def _read_header(self) -> None:
        if bytes(self.data[:4]) != b"GGUF":
            raise InputError(
                f"{self.path} is not a GGUF file", found=f"it begins with {bytes(self.data[:4])!r}"
            )
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise InputError(
                f"{self.path} has a GGUF version that is not read",
                found="big-endian" if version & 0xFFFF == 0 else version,
                expected="version 2 or 3, little-endian",
                action="convert the model with a current llama.cpp",
            )
        tensors, fields = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(fields):
            key = self._text()
            self.fields[key] = self._value(self._scalar("<I"))
        found = [self._tensor() for _ in range(tensors)]
        alignment = self.fields.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        self.header_bytes = base
        self.entries = {
            name: Entry(name, shape, kind, base + offset, _nbytes(shape, kind))
            for name, shape, kind, offset in found
        }

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data.data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _text(self) -> str:
        length = self._scalar("<Q")
        if self._at + length > len(self.data):
            raise IndexError
        text = bytes(self.data[self._at : self._at + length]).decode("utf-8")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        """A scalar, a text, or the length of an array, whose items are skipped."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item in (_STRING, _ARRAY):
            for _ in range(count):
                if item == _ARRAY:
                    self._value(_ARRAY)
                else:
                    length = self._scalar("<Q")
                    self._at += length
        else:
            self._at += count * struct.calcsize(_SCALARS[item])
        if self._at > len(self.data):
            raise IndexError
        return count

    def _tensor(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self._text()
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))[::-1]
        code, offset = self._scalar("<I"), self._scalar("<Q")
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError as error:
            raise InputError(
                f"{self.path} holds {name} in a type that is not known", found=f"GGML type {code}"
            ) from error
        if shape and shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            raise InputError(
                f"{self.path} is damaged: {name} of {list(shape)} cannot be {kind.name}", action=_AGAIN
            )
        return name, shape, kind, offset

    def rows(self, entry: Entry) -> np.ndarray:
        """The tensor's bytes, [rows, bytes of a row]; the leading axes of a stack are one."""
        raw = self.data[entry.start : entry.start + entry.nbytes]
        return raw.reshape(math.prod(entry.shape[:-1]), -1)

    def dequantise(self, entry: Entry, rows: slice | np.ndarray | None = None) -> np.ndarray:
        """float32 values of all rows, or of some, [rows, K]."""
        raw = self.rows(entry)
        raw = np.ascontiguousarray(raw if rows is None else raw[rows])
        try:
            return np.array(gguf_dequantize(raw, entry.kind), dtype=np.float32).reshape(len(raw), -1)
        except NotImplementedError as error:
            raise InputError(
                f"{self.path} holds {entry.name} in a type that is not read", found=entry.kind.name
            ) from error


def _nbytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


class GgufTensor(Weight):
    """A stored matrix (or stack of them), as float32; row i is the file's row `order[i]`. Holds integers (kept.py)."""

    dtype = torch.float32

    def __init__(self, name: str, file: GgufFile, entry: Entry, order: np.ndarray | None = None) -> None:
        self.name, self.file, self.entry, self.order = name, file, entry, order
        self.shape = entry.shape
        self.held = entry.held

    def load(self) -> torch.Tensor:
        return torch.from_numpy(self.file.dequantise(self.entry, self.order).reshape(self.shape))

    def load_rows(self, start: int, stop: int) -> torch.Tensor:
        inner = math.prod(self.shape[1:-1])
        span = slice(start * inner, stop * inner)
        values = self.file.dequantise(self.entry, span if self.order is None else self.order[span])
        return torch.from_numpy(values.reshape(-1, *self.shape[1:]))

    def part_shapes(self) -> tuple[tuple[int, ...], ...] | None:
        if self.entry.kind.name not in _UNPACK:
            return None
        form = parse_weight(self.held.format)
        table = (*self.shape[:-1], form.groups(self.shape[-1]))
        return (self.shape, table) if form.symmetric else (self.shape, table, table)

    def parts(self) -> Parts:
        raw = self.file.rows(self.entry)
        raw = raw if self.order is None else raw[self.order]
        codes, scales, offsets = _UNPACK[self.entry.kind.name](raw)

        def shaped(part: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(part)).reshape(*self.shape[:-1], -1)

        return shaped(codes), shaped(scales), None if offsets is None else shaped(offsets)


def _unpack_q4_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = raw.reshape(len(raw), -1, 18)
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, :, 2:]), scales, -8 * scales


def _unpack_q4_1(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = raw.reshape(len(raw), -1, 20)
    return _nibbles(blocks[:, :, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _unpack_q4_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eight groups of 32 a block: w = d · sc · code - dmin · m, with sc and m of six bits."""
    blocks = raw.reshape(len(raw), -1, 144)
    scale, minimum = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, :, 4:16]).reshape(-1, 12))
    shape = (len(raw), blocks.shape[1], 8)
    scales = _halves(blocks, 0)[..., None] * scale.reshape(shape)
    offsets = -_halves(blocks, 2)[..., None] * minimum.reshape(shape)
    packed = blocks[:, :, 16:].reshape(len(raw), -1, 4, 32)
    codes = np.stack([packed & 15, packed >> 4], axis=-2)
    rounded = [
        table.astype(np.float16).astype(np.float32).reshape(len(raw), -1) for table in (scales, offsets)
    ]
    return codes.reshape(len(raw), -1), rounded[0], rounded[1]


def _unpack_q8_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    blocks = raw.reshape(len(raw), -1, 34)
    return blocks[:, :, 2:].view(np.int8).reshape(len(raw), -1), _halves(blocks, 0), None


_UNPACK = {"Q4_0": _unpack_q4_0, "Q4_1": _unpack_q4_1, "Q4_K": _unpack_q4_k, "Q8_0": _unpack_q8_0}
"""[rows, bytes] -> codes [rows, K], scales and offsets [rows, K / 32] of the kept formats."""


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a place of each block, as float32 [rows, blocks]."""
    return np.ascontiguousarray(blocks[:, :, start : start + 2]).view(np.float16)[:, :, 0].astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[rows, blocks, 16] -> [rows, 32 · blocks]: low halves are a block's first sixteen codes."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


class _Processed(Weight):
    """A small tensor that goes through transformers' processor (norms, biases, reshaped kernels)."""

    dtype = torch.float32

    def __init__(self, name: str, file: GgufFile, entry: Entry, processor: Any) -> None:
        self.name, self.file, self.entry, self.processor = name, file, entry, processor
        self.shape = tuple(self._process(np.zeros(entry.shape, np.float32) - 1).shape)

    def load(self) -> torch.Tensor:
        values = self.file.dequantise(self.entry).reshape(self.entry.shape)
        return torch.from_numpy(np.array(self._process(values), dtype=np.float32))

    def _process(self, values: np.ndarray) -> np.ndarray:
        made: np.ndarray = self.processor.process(weights=values, name=self.entry.name).weights
        return made


class GgufSource:
    """A model in one GGUF file. Offers what `checkpoint.Source` asks for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"there is no file {self.path}", action="give a local .gguf file")
        self.file = GgufFile(self.path)
        self.notes: list[str] = []
        fields = self.file.fields
        if fields.get("split.count", 1) > 1:
            raise InputError(
                f"{self.path} is one part of a model",
                found=f"part {fields.get('split.no', 0) + 1} of {fields['split.count']}",
                action="join the parts with llama.cpp's llama-gguf-split --merge",
            )
        self.architecture = str(fields.get("general.architecture", ""))
        if fields.get("general.type", "model") != "model" or not self.file.entries:
            raise InputError(
                f"{self.path} holds no model",
                found=f"general.type {fields.get('general.type', 'model')}, {len(self.file.entries)} tensors",
                expected="a language model's weights",
            )
        self._header = _Header()
        self.config = self._read_config()

    def _read_config(self) -> Any:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        problem = f"transformers cannot read the configuration in {self.path}"
        with _understood(problem, self.architecture), self._header.given_to_transformers():
            config = AutoConfig.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True
            )
        if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise InputError(
                f"{self.path} is not a causal language model",
                found=f"model type {config.model_type}",
                expected="a decoder that transformers loads with AutoModelForCausalLM",
            )
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        _restore_rope(config, self.file, self.architecture, self.notes)
        return config

    def bind(self, model: Any) -> tuple[dict[str, Weight], list[str]]:
        """Weights for every name in the meta model's `state_dict()`, tied ones as one object, and notes."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        processor = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(config=self.config.to_dict())
        with _understood(f"transformers cannot name the tensors of {self.path}", self.architecture):
            names = get_gguf_hf_weights_map(model, processor)
        wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        pieces: dict[str, list[Weight]] = {}
        unused: list[str] = []
        arrange = _Arrangements(processor)
        for stored, entry in self.file.entries.items():
            name = names.get(stored) or names.get(stored.removesuffix(".weight"))
            if name is None or name not in wanted:
                unused.append(stored)
            else:
                pieces.setdefault(name, []).append(arrange(name, self.file, entry))
        bound = {name: _joined(name, parts) for name, parts in pieces.items()}
        notes = list(self.notes) + tie(model, bound, wanted)
        present: dict[str, Any] = dict.fromkeys(self.file.entries)
        check_bound(bound, wanted, present, unused, str(self.path), model)
        surprising = [name for name in unused if not name.startswith("rope_freqs")]
        if surprising:
            shown = ", ".join(surprising[:4]) + (", …" if len(surprising) > 4 else "")
            notes.append(
                f"{len(surprising)} tensors of the file are not part of the model and were left out: {shown}"
            )
        return {name: bound[name] for name in wanted if name in bound}, notes

    def tokenizer(self) -> Any:
        """transformers' tokenizer, made to add the begin-of-text token exactly where the file says so."""
        from transformers import AutoTokenizer

        problem = f"transformers cannot read the tokenizer in {self.path}"
        with _understood(problem, self.architecture), self._header.given_to_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True
            )
        self._header = _Header()  # a large vocabulary's header is hundreds of megabytes in gguf's form
        model = self.file.fields.get("tokenizer.ggml.model")
        wanted = self.file.fields.get("tokenizer.ggml.add_bos_token", model == "llama")
        _set_bos(tokenizer, bool(wanted))
        return tokenizer


class _Header:
    """One reading of a file's header for all that transformers asks, since each takes seconds."""

    def __init__(self) -> None:
        self._reader: gguf.GGUFReader | None = None

    @contextlib.contextmanager
    def given_to_transformers(self) -> Iterator[None]:
        with unittest.mock.patch.object(gguf, "GGUFReader", self._read):
            yield

    def _read(self, path: str | Path, mode: str = "r") -> gguf.GGUFReader:
        if self._reader is None:
            with unittest.mock.patch.object(
                np, "memmap", lambda *given, **named: np.asarray(_MEMMAP(*given, **named))
            ):
                self._reader = _READER(path)  # a plain array: slices of a memmap are slow
        return self._reader


_READER, _MEMMAP = gguf.GGUFReader, np.memmap


@contextlib.contextmanager
def _understood(problem: str, architecture: str) -> Iterator[None]:
    """Turn what transformers raises on files it does not know into an InputError."""
    try:
        yield
    except EnginewrightError:
        raise
    except Exception as error:  # all kinds are raised there, and plain Exception
        said = (str(error) or repr(error)).splitlines()[0]
        raise InputError(
            problem,
            found=f"architecture {architecture or 'not named'}: {said}",
            action="use the model's Hugging Face folder instead",
        ) from error


class _Arrangements:
    """What transformers' processor does to a stored tensor, found by giving it row and column numbers."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.known: dict[tuple[str, tuple[int, ...]], np.ndarray | str | None] = {}

    def __call__(self, name: str, file: GgufFile, entry: Entry) -> Weight:
        if _EXPERTS.search(entry.name):
            return GgufTensor(name, file, entry)
        if len(entry.shape) != 2:
            return _Processed(name, file, entry, self.processor)
        key = re.sub(r"\d+", "#", entry.name), entry.shape
        if key not in self.known:
            self.known[key] = self._probe(entry)
        order = self.known[key]
        if isinstance(order, np.ndarray):
            return GgufTensor(name, file, entry, order)
        if order == "same":
            return GgufTensor(name, file, entry)
        if order == "transposed":
            return transposed(GgufTensor(name, file, entry), name)
        return _Processed(name, file, entry, self.processor)

    def _probe(self, entry: Entry) -> np.ndarray | str | None:
        rows, columns = entry.shape
        of_row = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], entry.shape)
        of_column = np.broadcast_to(np.arange(columns, dtype=np.int32), entry.shape)
        moved = self._process(of_row, entry.name), self._process(of_column, entry.name)
        if moved[0] is of_row and moved[1] is of_column:
            return "same"
        if moved[0].shape == (columns, rows) and np.array_equal(moved[0].T, of_row):
            return "transposed" if np.array_equal(moved[1].T, of_column) else None
        if moved[0].shape != entry.shape or not np.array_equal(moved[1], of_column):
            return None
        order = moved[0][:, 0].copy()
        return order if np.array_equal(moved[0], np.broadcast_to(order[:, None], entry.shape)) else None

    def _process(self, values: np.ndarray, name: str) -> np.ndarray:
        made: np.ndarray = self.processor.process(
            weights=values, name=name, parsed_parameters={"tensors": {}}
        ).weights
        return made


def _joined(name: str, parts: list[Weight]) -> Weight:
    """One weight of the tensors that share a name: gate and up experts, [E, F, H] each, become [E, 2F, H]."""
    if len(parts) == 1:
        return parts[0]
    return concatenated(sorted(parts, key=_is_up), 1, name)


def _is_up(part: Weight) -> bool:
    leaf = next(part.leaves())
    assert isinstance(leaf, (GgufTensor, _Processed))
    return "up_exps" in leaf.entry.name


# --- what transformers leaves out


def _restore_rope(config: Any, file: GgufFile, architecture: str, notes: list[str]) -> None:
    """Put scaled rotary frequencies back into `config.rope_parameters`, or refuse them by name."""
    stray = [name for name in file.entries if name.startswith("rope_factors")]
    if stray:
        raise InputError(
            f"{file.path} holds rotary factors that cannot be read from a GGUF file",
            found=", ".join(stray),
            action="use the model's Hugging Face folder instead",
        )
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    target = rope.get("full_attention", rope) if isinstance(rope.get("full_attention", None), dict) else rope
    if target.get("rope_type", "default") != "default":
        return
    found = {
        key.removeprefix(f"{architecture}.rope.scaling."): value
        for key, value in file.fields.items()
        if key.startswith(f"{architecture}.rope.scaling.")
    }
    kind = found.get("type", "none")
    if "rope_freqs.weight" in file.entries:
        target.update(_llama3_rope(config, target, file))
    elif kind in ("linear", "yarn") and "factor" in found:
        target.update({"rope_type": kind, "factor": float(found["factor"])})
        if kind == "yarn":
            length = found.get("original_context_length", config.max_position_embeddings)
            target["original_max_position_embeddings"] = int(length)
            if "attn_factor" in found:
                target["attention_factor"] = float(found["attn_factor"])
    elif kind != "none":
        raise InputError(
            f"{file.path} scales its rotary frequencies in a way that cannot be read from a GGUF file",
            found=f"{architecture}.rope.scaling.type {kind}",
            action="use the model's Hugging Face folder instead",
        )
    if target.get("rope_type", "default") != "default":
        notes.append(f"rotary scaling '{target['rope_type']}' was taken from the file's metadata")


def _llama3_rope(config: Any, rope: Mapping[str, Any], file: GgufFile) -> dict[str, Any]:
    """Parameters of Llama 3's frequency scaling that give the file's divisors [R / 2]."""
    divisors = file.dequantise(file.entries["rope_freqs.weight"]).ravel()
    if np.all(divisors == 1):
        return {}
    count = len(divisors)
    wavelengths = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(count) / count)
    factor, low, high, length = float(divisors.max()), 1.0, 4.0, 8192
    smooth = (length / wavelengths - low) / (high - low)
    expected = np.where(
        wavelengths < length / high,
        1.0,
        np.where(wavelengths > length / low, factor, 1 / ((1 - smooth) / factor + smooth)),
    )
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise InputError(
            f"{file.path} holds rotary frequencies that no known rule gives",
            found="the tensor rope_freqs.weight",
            expected="Llama 3's rule: factors 1 to 4 of a length of 8192",
            action="use the model's Hugging Face folder instead",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def _set_bos(tokenizer: Any, wanted: bool) -> None:
    """Make the fast tokenizer add its begin-of-text token, or not."""
    from tokenizers.processors import TemplateProcessing

    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    ids = tokenizer("a")["input_ids"]
    if bos_id is None or (bool(ids) and ids[0] == bos_id) == wanted:
        return
    backend = tokenizer.backend_tokenizer
    if wanted:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    else:
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    if hasattr(tokenizer, "add_bos_token"):
        with contextlib.suppress(AttributeError, ValueError):
            tokenizer._add_bos_token = wanted
