"""The lowered program's meaning in numpy: every instruction of instructions.md, run from the files.

Values live in one arena at their planned offsets, poisoned with NaN, so that a plan which lets two live
values overlap shows in the results. One sequence, one step; keys and values are kept in full.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.cpu.pack import Array, Layout, unpack_tiles
from enginewright.recipes.formats import activation_group, default_activation
from tests.backends.cpu.packed_weights import from_bf16_bits, from_fp8, to_bf16_bits

Floats = npt.NDArray[np.float32]


def _erf(x: Floats) -> Floats:
    return np.vectorize(math.erf, otypes=[np.float32])(x)


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


KINDS: dict[str, Any] = {
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "square": np.square, "exp": np.exp, "exp2": np.exp2,
    "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": lambda x: 1 / x, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh,
    "cosh": np.cosh, "tanh": np.tanh, "sigmoid": _sigmoid, "erf": _erf, "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2, "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "softplus": lambda x: np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20)))),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)), "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6, "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "log_sigmoid": lambda x: -np.log1p(np.exp(-x)), "floor": np.floor, "ceil": np.ceil, "round": np.rint,
    "trunc": np.trunc, "identity": lambda x: x, "logical_not": np.logical_not, "isnan": np.isnan,
    "isinf": np.isinf, "bitwise_not": np.invert, "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "minimum": np.minimum, "maximum": np.maximum, "div": np.true_divide, "pow": np.power,
    "atan2": np.arctan2, "floor_divide": np.floor_divide, "remainder": np.remainder, "fmod": np.fmod,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_xor": np.logical_xor, "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor, "where": lambda c, a, b: np.where(c != 0, a, b),
    "lerp": lambda a, b, c: a + c * (b - a),
}  # fmt: skip

REDUCE: dict[str, Any] = {
    "sum": np.sum, "mean": np.mean, "prod": np.prod, "max": np.max, "min": np.min, "any": np.any,
    "all": np.all, "argmax": np.argmax, "argmin": np.argmin,
}  # fmt: skip


class Interpreter:
    """One sequence of `tokens` at `positions`, whose logits are wanted at `rows`."""

    def __init__(self, directory: Path) -> None:
        self.program = json.loads((directory / "program.json").read_text())
        self.file = np.fromfile(directory / "weights.bin", np.uint8)

    def run(self, tokens: list[int], rows: list[int] | None = None) -> Floats:
        count = len(tokens)
        self.inputs = {"tokens": np.array(tokens, np.int32), "positions": np.arange(count, dtype=np.int32)}
        self.rows = np.arange(count) if rows is None else np.array(rows)
        self.counts = {"tokens": count, "logits": len(self.rows)}
        self.arenas = {}
        for arena, n in self.counts.items():
            values = [v for v in self.program["values"] if v["rows"] == arena]
            size = max((v["offset"] + v["row_bytes"] for v in values), default=0)
            self.arenas[arena] = np.full(n * size // 4, np.nan, np.float32)
        self.cache: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        with np.errstate(all="ignore"):
            for instruction in self.program["instructions"]:
                run = getattr(self, "op_" + instruction["op"], self.generic)
                run(instruction, instruction["attrs"])
        return np.array(self.operand(self.program["output"]))

    # Memory.

    def value(self, index: int) -> Array:
        value = self.program["values"][index]
        n = self.counts[value["rows"]]
        start = value["offset"] * n // 4
        memory = self.arenas[value["rows"]][start : start + n * value["row_bytes"] // 4]
        rows = memory.reshape(n, -1)[:, : value["width"]]
        return rows if value["dtype"] == "f32" else rows.view(np.int32)

    def weight(self, index: int) -> Any:
        """A vector, a table, or the float32 matrix (or stack) of a linear; None for -1."""
        if index < 0:
            return None
        entry = self.program["weights"][index]
        data = self.file[entry["offset"] : entry["offset"] + entry["bytes"]]
        if entry["kind"] != "linear":
            numbers = data.view(np.float32 if entry["format"] == "f32" else np.int32)
            return numbers.reshape(entry["n"], -1) if entry["kind"] == "table" else numbers
        parts = np.split(data, entry.get("experts", 1))
        found = [self.matrix(entry, part) for part in parts]
        return np.stack(found) if "experts" in entry else found[0]

    def matrix(self, entry: dict[str, Any], data: Array) -> Floats:
        columns = entry.get("columns", [])
        layout = Layout(entry["format"], entry["n"], entry["k"], len(columns))
        if not entry.get("gated"):
            return self.dequantised(layout, data, columns)
        half = Layout(entry["format"], entry["n"] // 2, entry["k"], len(columns))
        tiles = data.reshape(-1, layout.tile_bytes)
        return np.concatenate(
            [self.dequantised(half, np.ascontiguousarray(tiles[i::2]).ravel(), columns) for i in (0, 1)]
        )

    @staticmethod
    def dequantised(layout: Layout, data: Array, columns: list[int]) -> Floats:
        rows, form = unpack_tiles(layout, data), layout.form
        if layout.format == "bf16":
            return from_bf16_bits(rows.values)
        values = from_fp8(rows.values) if layout.format == "fp8" else rows.values
        values = values.astype(np.float32)
        if rows.scales is not None:
            group = form.group or layout.k
            scales = rows.scales.repeat(group, 1)[:, : layout.k]
            if rows.offsets is None:
                values = values * scales
            else:
                second = rows.offsets.repeat(group, 1)[:, : layout.k]
                values = (values - second) * scales if form.kind == "zero" else values * scales + second
        if rows.outliers is not None:
            assert not values[:, columns].any()
            values[:, columns] = from_bf16_bits(rows.outliers)
        return values

    def rounded(self, x: Floats, index: int) -> Floats:
        """x [rows, k] as the products with a weight see it."""
        entry = self.program["weights"][index]
        activation = entry.get("activation", default_activation(entry["format"]))
        if activation == "f32":
            return x
        if activation == "bf16":
            return from_bf16_bits(to_bf16_bits(x))
        columns = entry.get("columns", [])
        result = x.copy()
        result[:, columns] = 0
        if activation == "int8_static":
            scale = np.float32(entry["activation_scale"])
            result = np.clip(np.rint(result / scale), -127, 127) * scale
        else:
            k = x.shape[1]
            group = activation_group(activation) or k
            groups = np.pad(result, ((0, 0), (0, -k % group))).reshape(len(x), -1, group)
            scale = np.abs(groups).max(2, keepdims=True) / np.float32(127)
            codes = np.rint(groups / np.where(scale > 0, scale, 1))
            result = (codes * scale).reshape(len(x), -1)[:, :k]
        result[:, columns] = from_bf16_bits(to_bf16_bits(x[:, columns]))
        return result.astype(np.float32)

    def operand(self, operand: dict[str, Any]) -> Any:
        if "scalar" in operand:
            return operand["scalar"]
        if "input" in operand:
            return self.inputs[operand["input"]][:, None]
        if "weight" in operand:
            flat = self.weight(operand["weight"]).reshape(1, -1)
        else:
            flat = self.value(operand["value"])
        column = operand.get("column", 0)
        width = operand.get("width", flat.shape[1])
        assert column + width <= flat.shape[1], "an operand reaches beyond its value"
        return flat[:, column : column + width]

    def strided(self, operand: dict[str, Any], shape: list[int], strides: list[int]) -> Any:
        found = self.operand(operand)
        if not isinstance(found, np.ndarray):
            return found
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        assert reach <= found.shape[1], "strides reach beyond the operand"
        steps = [found.strides[0], *(found.itemsize * s for s in strides)]
        return np.lib.stride_tricks.as_strided(found, (len(found), *shape), steps)

    # Instructions.

    def op_embedding(self, i: Any, a: Any) -> None:
        index = self.operand(i["in"][0])[:, 0] if a["index"] == "value" else self.inputs[a["index"]]
        table = self.weight(i["weights"][0])
        self.operand(i["out"][0])[:] = table[index + a.get("offset", 0)] * a.get("scale", 1.0)

    def product(self, x: Floats, weights: list[int]) -> Floats:
        matrix, bias = (self.weight(index) for index in weights)
        result = self.rounded(x, weights[0]) @ matrix.T
        return result if bias is None else result + bias

    def op_linear(self, i: Any, a: Any) -> None:
        x = self.operand(i["in"][0])
        y = self.product(x.reshape(-1, x.shape[1] // a.get("inner", 1)), i["weights"])
        self.operand(i["out"][0])[:] = y.reshape(len(x), -1)

    @staticmethod
    def unpacked_bias(bias: Floats, half: int) -> Floats:
        return np.concatenate([bias.reshape(-1, 2, 16)[:, part].ravel()[:half] for part in (0, 1)])

    @staticmethod
    def gate(both: Floats, a: Any) -> Floats:
        gate, up = np.split(both, 2, -1)
        if a["activation"] == "swiglu_oai":
            if a["limit"]:
                gate, up = np.minimum(gate, a["limit"]), np.clip(up, -a["limit"], a["limit"])
            return (up + 1) * gate * _sigmoid(a["alpha"] * gate)
        return KINDS[a["activation"]](gate) * up

    def op_linear_gated(self, i: Any, a: Any) -> None:
        both = self.product(self.operand(i["in"][0]), [i["weights"][0], -1])
        if i["weights"][1] >= 0:
            both = both + self.unpacked_bias(self.weight(i["weights"][1]), both.shape[1] // 2)
        self.operand(i["out"][0])[:] = self.gate(both, a)

    def op_moe(self, i: Any, a: Any) -> None:
        x, index, weight = (self.operand(o) for o in i["in"])
        gate_up, gate_bias, down, down_bias = (self.weight(w) for w in i["weights"])
        half = gate_up.shape[1] // 2
        result = np.zeros_like(x)
        for t in range(len(x)):
            for j in range(a["top_k"]):
                e = index[t, j]
                both = gate_up[e] @ self.rounded(x[t : t + 1], i["weights"][0])[0]
                if gate_bias is not None:
                    both = both + self.unpacked_bias(gate_bias.reshape(a["experts"], -1)[e], half)
                y = down[e] @ self.rounded(self.gate(both, a)[None], i["weights"][2])[0]
                if down_bias is not None:
                    y = y + down_bias.reshape(a["experts"], -1)[e]
                result[t] += weight[t, j] * y
        self.operand(i["out"][0])[:] = result

    def norm(self, i: Any, a: Any, centre: bool) -> None:
        inputs, outputs = ([self.operand(o) for o in i[side]] for side in ("in", "out"))
        total = inputs[0] + inputs[1] if len(inputs) > 1 else inputs[0].copy()
        x = total.reshape(len(total), -1, a["dim"])
        if centre:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + a["eps"])
        weights = [self.weight(index) for index in i["weights"]]
        if weights[0] is not None:
            x = x * (weights[0] + a.get("weight_offset", 0.0))
        if centre and weights[1] is not None:
            x = x + weights[1]
        if len(outputs) > 1:
            outputs[1][:] = total
        outputs[0][:] = x.reshape(total.shape)

    def op_rms_norm(self, i: Any, a: Any) -> None:
        self.norm(i, a, False)

    def op_layer_norm(self, i: Any, a: Any) -> None:
        self.norm(i, a, True)

    def op_activation(self, i: Any, a: Any) -> None:
        self.operand(i["out"][0])[:] = KINDS[a["activation"]](self.operand(i["in"][0]))

    def op_gated_activation(self, i: Any, a: Any) -> None:
        both = np.concatenate([self.operand(o) for o in i["in"]], 1)
        self.operand(i["out"][0])[:] = self.gate(both, a)

    def turn(self, x: Floats, heads: int, tables: list[int], a: Any) -> None:
        if tables[0] < 0:
            return
        cos, sin = (self.weight(index)[self.inputs["positions"]][:, None] for index in tables)
        rotary = a["rotary_dim"]
        part = x.reshape(len(x), heads, -1)[..., :rotary]
        if a["interleaved"]:
            first, second = slice(0, rotary, 2), slice(1, rotary, 2)
        else:
            first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
        left, right = (
            part[..., first] * cos - part[..., second] * sin,
            part[..., second] * cos + part[..., first] * sin,
        )
        view = np.lib.stride_tricks.as_strided(
            x, (len(x), heads, x.shape[1] // heads), (x.strides[0], 4 * (x.shape[1] // heads), 4)
        )
        view[..., :rotary][..., first], view[..., :rotary][..., second] = left, right

    def op_rope(self, i: Any, a: Any) -> None:
        assert i["in"] == i["out"]
        self.turn(self.operand(i["in"][0]), a["heads"], i["weights"], a)

    def op_rope_write(self, i: Any, a: Any) -> None:
        if i["in"][0] is not None:
            self.turn(self.operand(i["in"][0]), a["q_heads"], i["weights"], a)
        k, v = (self.operand(o) for o in i["in"][1:])
        self.turn(k, a["kv_heads"], i["weights"], a)
        shape = (len(k), a["kv_heads"], -1)
        self.cache[a["group"], a["layer"]] = k.reshape(shape).copy(), v.reshape(shape).copy()

    def op_attention(self, i: Any, a: Any) -> None:
        q = self.operand(i["in"][0]).reshape(-1, a["q_heads"], a["key_dim"])
        share = a["q_heads"] // a["kv_heads"]
        k, v = (part.repeat(share, 1) for part in self.cache[a["group"], a["layer"]])
        scores = np.einsum("thd,shd->hts", q, k) * a["scale"]
        if a["softcap"]:
            scores = a["softcap"] * np.tanh(scores / a["softcap"])
        sinks, alibi = (self.weight(index) for index in i["weights"])
        distance = np.arange(len(k))[None] - np.arange(len(q))[:, None]
        if alibi is not None:
            scores = scores + alibi[:, None, None] * distance
        window = a["window"] or len(k)
        scores = np.where((distance <= 0) & (distance > -window), scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        total = powers.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[:, None, None] - scores.max(-1, keepdims=True))
        self.operand(i["out"][0])[:] = np.einsum("hts,shd->thd", powers / total, v).reshape(len(q), -1)

    def op_select_rows(self, i: Any, a: Any) -> None:
        self.operand(i["out"][0])[:] = self.operand(i["in"][0])[self.rows]

    def generic(self, i: Any, a: Any) -> None:
        operands = [*i["in"], *i["out"]]
        spaces = [a["shape"]] * len(operands)
        first_out = len(i["in"])
        axis = a.get("axis")
        if i["op"] == "topk":
            chosen = [*a["shape"][:axis], a["k"], *a["shape"][axis + 1 :]]
            spaces = [a["shape"], chosen, chosen]
        if i["op"] in ("gather", "scatter"):
            long = [*a["shape"][:axis], a["extent"], *a["shape"][axis + 1 :]]
            spaces = [long, a["shape"], a["shape"]] if i["op"] == "gather" else [a["shape"], a["shape"], long]
        views = [
            None if o is None else self.strided(o, space, strides)
            for o, space, strides in zip(operands, spaces, a["strides"], strict=True)
        ]
        inputs, outputs = views[:first_out], views[first_out:]
        getattr(self, "run_" + i["op"])(a, inputs, outputs)

    def run_elementwise(self, a: Any, inputs: Any, outputs: Any) -> None:
        floats = any(
            isinstance(x, np.ndarray) and x.dtype == np.float32 for x in inputs[a["kind"] == "where" :]
        )
        cast = [np.float32(x) if floats and not isinstance(x, np.ndarray) else x for x in inputs]
        outputs[0][:] = KINDS[a["kind"]](*cast)

    def run_copy(self, a: Any, inputs: Any, outputs: Any) -> None:
        outputs[0][:] = inputs[0]

    def run_reduce(self, a: Any, inputs: Any, outputs: Any) -> None:
        axes = tuple(axis + 1 for axis in a["axes"])
        x = np.prod(np.broadcast_arrays(*inputs), axis=0) if a["kind"] == "dot" else inputs[0]
        along: Any = axes[0] if a["kind"].startswith("arg") else axes
        result = REDUCE["sum" if a["kind"] == "dot" else a["kind"]](x, axis=along, keepdims=True)
        outputs[0][tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim))] = result

    def run_softmax(self, a: Any, inputs: Any, outputs: Any) -> None:
        away = inputs[0] - inputs[0].max(a["axis"] + 1, keepdims=True)
        total = np.exp(away).sum(a["axis"] + 1, keepdims=True)
        outputs[0][:] = away - np.log(total) if a["log"] else np.exp(away) / total

    def run_cumulate(self, a: Any, inputs: Any, outputs: Any) -> None:
        run = np.cumsum if a["kind"] == "sum" else np.cumprod
        outputs[0][:] = run(inputs[0], axis=a["axis"] + 1)

    def run_topk(self, a: Any, inputs: Any, outputs: Any) -> None:
        key = -inputs[0] if a["largest"] else inputs[0]
        order = np.argsort(key, axis=a["axis"] + 1, kind="stable")
        order = np.take(order, range(a["k"]), axis=a["axis"] + 1)
        for out, values in zip(
            outputs, (np.take_along_axis(inputs[0], order, a["axis"] + 1), order), strict=True
        ):
            if out is not None:
                out[:] = values

    def run_gather(self, a: Any, inputs: Any, outputs: Any) -> None:
        x, index = inputs
        n = outputs[0].shape[0]
        x, index = (np.broadcast_to(part, (n, *part.shape[1:])) for part in (x, index))
        outputs[0][:] = np.take_along_axis(x, index, a["axis"] + 1)

    def run_scatter(self, a: Any, inputs: Any, outputs: Any) -> None:
        index, source = inputs
        source = np.broadcast_to(np.asarray(source), (len(outputs[0]), *index.shape[1:]))
        for at in np.ndindex(*source.shape):
            place = list(at)
            place[a["axis"] + 1] = index[at if len(index) > 1 else (0, *at[1:])]
            old = outputs[0][tuple(place)] if a["kind"] == "add" else 0
            outputs[0][tuple(place)] = old + source[at]
