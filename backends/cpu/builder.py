"""The lowered program while it is built: values, weights, instructions, and data with planned buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from enginewright.backends.cpu.plan import Access, Buffer, plan
from enginewright.backends.cpu.views import View, contiguous_strides, merged_axes
from enginewright.backends.cpu.weights_file import WeightsFile

__all__ = ["Builder", "Instruction", "Operand"]

Operand: TypeAlias = "View | int | float | None"
"""What an instruction takes: a view, a number (generic ops), or nothing."""

#: Instructions whose work is split by the rows of a step; neighbours run without a barrier between them.
_ROW_SPLIT = """embedding rms_norm layer_norm activation gated_activation rope elementwise copy reduce softmax
    cumulate topk gather scatter"""


@dataclass
class Instruction:
    """One line of the program.

    `in_place` lists (output, input) positions that may be one buffer, `changes` the inputs that it overwrites.
    """

    op: str
    inputs: list[Operand]
    outputs: list[View | None]
    weights: list[int]
    attrs: dict[str, Any]
    module: str
    in_place: list[tuple[int, int]] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)


class Builder:
    """Appends instructions in order. `module` names the part of the model being lowered, for messages."""

    def __init__(self, weights: WeightsFile | None = None) -> None:
        self.values: list[dict[str, Any]] = []
        self.weights = WeightsFile() if weights is None else weights
        self.instructions: list[Instruction] = []
        self.module = ""

    # Values.

    def value(self, shape: Sequence[int], dtype: str = "f32", rows: str = "tokens", name: str = "") -> View:
        """A new value that holds `shape` in row-major order."""
        index = len(self.values)
        self.values.append({"name": name, "dtype": dtype, "rows": rows, "width": max(1, math.prod(shape))})
        return View(("value", index), tuple(shape), contiguous_strides(shape), dtype=dtype, rows=rows)

    def whole(self, view: View) -> bool:
        """Whether the view is all of a value, in order."""
        kind, index = view.source
        return kind == "value" and view.contiguous and view.size == self.values[int(index)]["width"]

    # Instructions.

    def emit(
        self,
        op: str,
        inputs: Sequence[Operand],
        outputs: Sequence[View | None],
        weights: Sequence[int] = (),
        *,
        changes: Sequence[int] = (),
        **attrs: Any,
    ) -> Instruction:
        """Append an instruction over contiguous operands."""
        instruction = Instruction(op, list(inputs), list(outputs), list(weights), attrs, self.module)
        instruction.changes = list(changes)
        self.instructions.append(instruction)
        return instruction

    def generic(
        self, op: str, inputs: Sequence[Operand], outputs: Sequence[View | None], **attrs: Any
    ) -> Instruction:
        """Append a strided instruction: `inputs` and `outputs` are views that broadcast to attrs["shape"]."""
        strides = [[] if not isinstance(o, View) else list(o.strides) for o in (*inputs, *outputs)]
        return self.emit(op, inputs, outputs, strides=strides, **attrs)

    def pointwise(self, op: str, inputs: Sequence[Operand], output: View, **attrs: Any) -> View:
        """Append an elementwise instruction or a copy whose views all have the output's shape."""
        views = [o for o in (*inputs, output) if isinstance(o, View)]
        shape, merged = merged_axes(output.shape, [v.strides for v in views])
        rest = iter(merged)
        strides = [next(rest) if isinstance(o, View) else [] for o in (*inputs, output)]
        made = self.emit(op, inputs, [output], shape=shape, strides=strides, **attrs)
        for position, operand in enumerate(inputs):
            same = [
                o
                for o in inputs
                if isinstance(o, View) and isinstance(operand, View) and o.source == operand.source
            ]
            if isinstance(operand, View) and self.whole(operand) and all(o == operand for o in same):
                made.in_place.append((0, position))
        return output

    def copied(self, view: View, dtype: str | None = None, name: str = "") -> View:
        """The view's elements in a new value, converted to `dtype` where given."""
        target = self.value(view.shape, dtype or view.dtype, view.rows or "tokens", name)
        return self.pointwise("copy", [view], target)

    def dense(self, view: View) -> View:
        """The view itself when its elements are consecutive columns of a value, else a copy that is."""
        return view if view.source[0] == "value" and view.contiguous else self.copied(view)

    # The finished program.

    def finish(self, output: View) -> dict[str, Any]:
        """Make in-place changes safe, plan the buffers, and return the program's lists as plain data.

        Weights stand in them as places in `weights`.
        """
        _protect(self)
        plan_ = plan(
            [Buffer(4 * value["width"], value["rows"]) for value in self.values],
            self._accesses(),
            [int(output.source[1])],
        )
        values = [
            {**value, "row_bytes": -(-4 * value["width"] // 64) * 64, "offset": offset}
            for value, offset in zip(self.values, plan_.offsets, strict=True)
        ]
        instructions = [
            {
                "op": i.op,
                "in": [_operand(o) for o in i.inputs],
                "out": [_operand(o) for o in i.outputs],
                "weights": i.weights,
                "attrs": i.attrs,
                "module": i.module,
            }
            for i in self.instructions
        ]
        return {
            "values": values,
            "instructions": instructions,
            "output": _operand(output),
        }

    def _accesses(self) -> list[Access]:
        accesses, phase, row_split = [], 0, False
        row_split_ops = _ROW_SPLIT.split()
        for instruction in self.instructions:
            mine = instruction.op in row_split_ops
            phase += not (mine and row_split)
            row_split = mine
            reads = [value_of(o) for o in instruction.inputs]
            writes = [value_of(o) for o in instruction.outputs]
            shares = tuple(
                (write, read)
                for out, position in instruction.in_place
                if (write := writes[out]) is not None and (read := reads[position]) is not None
            )
            accesses.append(
                Access(
                    tuple(value for value in reads if value is not None),
                    tuple(value for value in writes if value is not None),
                    phase,
                    shares,
                )
            )
        return accesses


def value_of(operand: Operand) -> int | None:
    """The index of the value that an operand lies in; None for numbers, weights and inputs."""
    return int(operand.source[1]) if isinstance(operand, View) and operand.source[0] == "value" else None


def _operand(operand: Operand) -> dict[str, Any] | None:
    if operand is None:
        return None
    if not isinstance(operand, View):
        return {"scalar": operand}
    kind, index = operand.source
    if kind == "input":
        return {"input": index}
    return {kind: index, "column": operand.column, "width": operand.reach - operand.column}


def _overlap(left: View, right: View) -> bool:
    return left.source == right.source and left.column < right.reach and right.column < left.reach


def _protect(builder: Builder) -> None:
    """Where an instruction changes an operand that someone reads later, let it change a copy.

    `attention` reads the query that the `rope_write` before it rotated: it follows the copy.
    """
    at = 0
    while at < len(builder.instructions):
        instruction = builder.instructions[at]
        for position in instruction.changes:
            operand = instruction.inputs[position]
            assert isinstance(operand, View)
            heirs = [i for i in builder.instructions[at + 1 :] if i.attrs.get("after") is instruction]
            readers = [
                i
                for i in builder.instructions[at + 1 :]
                if i not in heirs
                and any(isinstance(o, View) and _overlap(o, operand) for o in (*i.inputs, *i.outputs))
            ]
            others = [o for j, o in enumerate(instruction.inputs) if j != position and isinstance(o, View)]
            if not readers and not any(_overlap(o, operand) for o in others):
                continue
            target = builder.value(operand.shape, operand.dtype, operand.rows)
            shape, (source, dense) = merged_axes(operand.shape, [operand.strides, target.strides])
            copy = Instruction("copy", [operand], [target], [], {}, instruction.module)
            copy.attrs = {"shape": shape, "strides": [source, dense]}
            builder.instructions.insert(at, copy)
            at += 1
            instruction.inputs[position] = target
            if instruction.op == "rope":
                instruction.outputs = [target]
            for heir in heirs:
                heir.inputs = [target if o == operand else o for o in heir.inputs]
        at += 1
    for instruction in builder.instructions:
        instruction.attrs.pop("after", None)
