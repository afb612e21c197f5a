"""Hand-made lowered programs for the executor's tests: random weights, and one program like a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.backends.base import StepInput
from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.recipes.formats import parse_weight
from tests.backends.cpu.packed_weights import pack_codes, pack_float, random_weight

Operand = dict[str, Any]


class SmallProgram:
    """Grows program.json and weights.bin; values never share memory."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.document: dict[str, Any] = {
            "version": 1,
            "vocab_size": vocab_size,
            "values": [],
            "weights": [],
            "kv_groups": [],
            "instructions": [],
            "output": None,
        }
        self.data = bytearray()
        self._next = {"tokens": 0, "logits": 0}

    def value(self, width: int, dtype: str = "f32", rows: str = "tokens") -> Operand:
        row_bytes = 4 * width
        entry = {
            "name": "",
            "dtype": dtype,
            "rows": rows,
            "width": width,
            "row_bytes": row_bytes,
            "offset": self._next[rows],
        }
        self._next[rows] += -(-row_bytes // 64) * 64
        self.document["values"].append(entry)
        return {"value": len(self.document["values"]) - 1, "column": 0, "width": width}

    def weight(
        self, data: np.ndarray, kind: str, format: str, n: int, k: int | None = None, **more: Any
    ) -> int:
        self.data += bytes(-len(self.data) % 64)
        raw = np.ascontiguousarray(data).tobytes()
        entry = {"name": f"w{len(self.document['weights'])}", "kind": kind, "format": format, "n": n, **more}
        if k is not None:
            entry["k"] = k
        self.document["weights"].append({**entry, "offset": len(self.data), "bytes": len(raw)})
        self.data += raw
        return len(self.document["weights"]) - 1

    def vector(self, values: np.ndarray) -> int:
        integer = values.dtype.kind == "i"
        return self.weight(
            values.astype(np.int32 if integer else np.float32),
            "vector",
            "i32" if integer else "f32",
            values.size,
        )

    def table(self, values: np.ndarray) -> int:
        return self.weight(values.astype(np.float32), "table", "f32", *values.shape)

    def linear(self, format: str, n: int, k: int, experts: int = 0, **rounding: Any) -> int:
        """`rounding`: an `activation` and `outliers`, how many columns an int8 matrix keeps apart."""
        columns, more = self._rounding(k, experts, rounding)
        parts = [self._random(format, n, k, columns) for _ in range(max(experts, 1))]
        return self.weight(np.concatenate(parts), "linear", format, n, k, **more)

    def gated(self, format: str, features: int, k: int, experts: int = 0, **rounding: Any) -> int:
        columns, more = self._rounding(k, experts, rounding)
        parts = []
        for _ in range(max(experts, 1)):
            gate, up = (self._random(format, features, k, columns) for _ in range(2))
            tiles = -(-features // 16)
            parts.append(np.stack([gate.reshape(tiles, -1), up.reshape(tiles, -1)], 1).ravel())
        return self.weight(np.concatenate(parts), "linear", format, 2 * features, k, gated=True, **more)

    def _rounding(self, k: int, experts: int, rounding: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        more: dict[str, Any] = {"experts": experts} if experts else {}
        if activation := rounding.get("activation"):
            more["activation"] = activation
            if activation == "int8_static":
                more["activation_scale"] = 0.04
        columns = sorted(self.rng.choice(k, rounding.get("outliers", 0), replace=False).tolist())
        return columns, more | ({"columns": columns} if columns else {})

    def _random(self, format: str, n: int, k: int, columns: list[int]) -> np.ndarray:
        """About unit outputs for unit inputs."""
        scale = 1 / np.sqrt(k)
        if format in ("f32", "bf16"):
            return pack_float(format, self.rng.normal(size=(n, k)) * scale).data
        form = parse_weight(format)
        if form.has_offsets:
            codes = self.rng.integers(0, 2**form.bits, (n, k)).astype(np.uint8)
            scales = np.full((n, form.groups(k)), scale * 4 / 2**form.bits)
            middle = (2**form.bits - 1) / 2
            seconds = np.full_like(scales, middle) if form.kind == "zero" else -middle * scales
            return pack_codes(format, codes, scales, seconds).data
        if columns:
            codes = self.rng.integers(-127, 128, (n, k)).astype(np.int8)
            codes[:, columns] = 0
            kept = self.rng.normal(size=(n, len(columns))) * scale
            return pack_codes(format, codes, np.full((n, 1), scale / 64), None, columns, kept).data
        return random_weight(self.rng, format, n, k).data

    def emit(
        self, op: str, inputs: list[Any], outputs: list[Any], weights: list[int] | None = None, **attrs: Any
    ) -> None:
        self.document["instructions"].append(
            {
                "op": op,
                "in": inputs,
                "out": outputs,
                "weights": weights or [],
                "attrs": attrs,
                "module": f"test.{op}",
            }
        )

    def finish(self, output: Operand) -> None:
        self.document["output"] = output

    def write(self, folder: Path) -> Path:
        (folder / "program.json").write_text(json.dumps(self.document))
        (folder / "weights.bin").write_bytes(bytes(self.data))
        return folder

    def load(self, folder: Path, pages: int = 64, **options: Any) -> CpuExecutor:
        self.write(folder)
        executor = CpuExecutor(folder / "program.json", folder / "weights.bin", **options)
        executor.create_pool([pages] * len(self.document["kv_groups"]))
        return executor


def model(
    format: str = "f32",
    *,
    kv_format: str = "f32",
    layer_formats: tuple[str, ...] = (),
    experts: int = 0,
    windows: tuple[int, ...] = (0, 20),
    seed: int = 0,
    **rounding: Any,
) -> SmallProgram:
    """Layers of everything a transformer has: vocabulary 50, hidden 48, 4 query heads, 2 kv heads.

    <<<<<<< HEAD
        `rounding` (of `SmallProgram.linear`) is that of the layers' matrices, experts and the head left out.
    =======
        `layer_formats`: of the cache, a layer each; all layers then stand in one KV group, whose window is the first.
    >>>>>>> native-kv
    """
    vocab, hidden, features, q_heads, kv_heads, key_dim, value_dim, rotary, limit = (
        50,
        48,
        40,
        4,
        2,
        16,
        8,
        12,
        2048,
    )
    p = SmallProgram(vocab, seed)
    angles = np.arange(limit)[:, None] / 100.0 ** (np.arange(rotary // 2) / (rotary // 2))
    cos, sin = p.table(np.cos(angles)), p.table(np.sin(angles))
    table = p.linear(format, vocab, hidden)
    learned = p.table(p.rng.normal(size=(limit + 2, hidden)) * 0.1)
    p.document["kv_groups"] = [
        {
            "window": window,
            "format": kv_format,
            "page_size": 16 if g == 0 else 32,
            "layers": [{"kv_heads": kv_heads, "key_dim": key_dim, "value_dim": value_dim}],
        }
        for g, window in enumerate(windows)
    ]
    if layer_formats:
        group, *_ = p.document["kv_groups"]
        group["layers"] = [{**group["layers"][0], "format": f} for f in layer_formats]
        p.document["kv_groups"] = [group]
        windows = windows[:1] * len(layer_formats)
    x, at, total = p.value(hidden), p.value(hidden), p.value(hidden)
    p.emit("embedding", [], [x], [table], index="tokens", scale=1.5)
    p.emit("embedding", [], [at], [learned], index="positions", offset=2)
    p.emit("elementwise", [x, at], [total], kind="add", shape=[hidden], strides=[[1]] * 3)
    x = total
    for layer in range(len(windows)):
        normed, qkv = p.value(hidden), p.value(q_heads * key_dim + kv_heads * (key_dim + value_dim))
        p.emit(
            "rms_norm",
            [x],
            [normed],
            [p.vector(p.rng.normal(size=hidden))],
            eps=1e-5,
            dim=hidden,
            weight_offset=1.0,
        )
        p.emit(
            "linear",
            [normed],
            [qkv],
            [
                p.linear(format, qkv["width"], hidden, **rounding),
                p.vector(p.rng.normal(size=qkv["width"]) * 0.1),
            ],
        )
        q, k, v = {**qkv, "width": 64}, {**qkv, "column": 64, "width": 32}, {**qkv, "column": 96, "width": 16}
        p.emit("rms_norm", [q], [q], [-1], eps=1e-5, dim=key_dim)
        shape = {"q_heads": q_heads, "kv_heads": kv_heads, "key_dim": key_dim, "value_dim": value_dim}
        shape |= {"group": 0, "layer": layer} if layer_formats else {"group": layer, "layer": 0}
        p.emit(
            "rope_write", [q, k, v], [], [cos, sin], rotary_dim=rotary, interleaved=layer % 2 == 1, **shape
        )
        mixed, out, added = p.value(q_heads * value_dim), p.value(hidden), p.value(hidden)
        extras = (
            [p.vector(p.rng.normal(size=q_heads)), -1]
            if layer == 0
            else [-1, p.vector(p.rng.uniform(0, 0.2, q_heads))]
        )
        p.emit(
            "attention",
            [q],
            [mixed],
            extras,
            scale=0.25,
            softcap=30.0 * layer,
            window=windows[layer],
            **shape,
        )
        p.emit("linear", [mixed], [out], [p.linear(format, hidden, mixed["width"], **rounding), -1])
        weights = [p.vector(p.rng.normal(size=hidden)), p.vector(p.rng.normal(size=hidden))]
        normed = p.value(hidden)
        p.emit("layer_norm", [out, x], [normed, added], weights, eps=1e-5, dim=hidden)
        contribution = p.value(hidden)
        if experts:
            _experts(p, normed, contribution, format, features, experts)
        else:
            hidden_value = p.value(features)
            bias = p.vector(p.rng.normal(size=96) * 0.1)
            p.emit(
                "linear_gated",
                [normed],
                [hidden_value],
                [p.gated(format, features, hidden, **rounding), bias],
                activation="silu",
            )
            p.emit(
                "linear", [hidden_value], [contribution], [p.linear(format, hidden, features, **rounding), -1]
            )
        x = p.value(hidden)
        p.emit("elementwise", [added, contribution], [x], kind="add", shape=[hidden], strides=[[1]] * 3)
    chosen, final, logits = (p.value(width, rows="logits") for width in (hidden, hidden, vocab))
    p.emit("select_rows", [x], [chosen])
    p.emit("rms_norm", [chosen], [final], [-1], eps=1e-5, dim=hidden)
    p.emit("linear", [final], [logits], [table, -1])
    p.finish(logits)
    return p


def _experts(p: SmallProgram, x: Operand, y: Operand, format: str, features: int, experts: int) -> None:
    width, top_k = x["width"], 2
    scores, values, index, weight = p.value(experts), p.value(top_k), p.value(top_k, "i32"), p.value(top_k)
    p.emit("linear", [x], [scores], [p.linear("f32", experts, width), -1])
    p.emit(
        "topk", [scores], [values, index], axis=0, k=top_k, largest=True, shape=[experts], strides=[[1]] * 3
    )
    p.emit("softmax", [values], [weight], axis=0, log=False, shape=[top_k], strides=[[1]] * 2)
    gate_up, down = p.gated(format, features, width, experts), p.linear(format, width, features, experts)
    biases = [p.vector(p.rng.normal(size=experts * n) * 0.1) for n in (96, width)]
    attrs = {"activation": "swiglu_oai", "alpha": 1.7, "limit": 2.0, "experts": experts, "top_k": top_k}
    p.emit("moe", [x, index, weight], [y], [gate_up, biases[0], down, biases[1]], **attrs)


class Pages:
    """Page tables for tests: every sequence owns pages of its own, handed out in a shuffled order."""

    def __init__(self, sizes: list[int], pages: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.sizes = sizes
        self.free = [list(rng.permutation(pages)) for _ in sizes]
        self.tables: dict[int, list[list[int]]] = {}

    def table(self, sequence: int, length: int) -> list[list[int]]:
        """The sequence's tables, grown to `length` tokens."""
        tables = self.tables.setdefault(sequence, [[] for _ in self.sizes])
        for group, size in enumerate(self.sizes):
            while len(tables[group]) * size < length:
                tables[group].append(int(self.free[group].pop()))
        return tables


def step_input(
    pages: Pages, work: list[tuple[int, int, list[int]]], logit_rows: list[int] | None = None
) -> StepInput:
    """work: (sequence, tokens cached, new tokens). Logits of every row unless given."""
    starts, positions, tokens, lens = [0], [], [], []
    tables = []
    for sequence, cached, new in work:
        tokens += new
        positions += range(cached, cached + len(new))
        starts.append(len(tokens))
        lens.append(cached + len(new))
        tables.append(pages.table(sequence, lens[-1]))
    width = max((len(table) for sequence in tables for table in sequence), default=1)
    array = np.full((len(pages.sizes), len(work), max(width, 1)), -1, np.int32)
    for s, sequence_tables in enumerate(tables):
        for g, table in enumerate(sequence_tables):
            array[g, s, : len(table)] = table
    rows = list(range(len(tokens))) if logit_rows is None else logit_rows
    lists = (tokens, positions, starts, lens)
    token_ids, at, seq_starts, context_lens = (np.array(values, np.int32) for values in lists)
    return StepInput(token_ids, at, seq_starts, context_lens, array, np.array(rows, np.int32))
