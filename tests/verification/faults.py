"""Faults as someone might write them, each planted in one place of the real code, and who is to be named for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from enginewright.backends.base import StepInput
from enginewright.backends.cpu import builder, pack, weights_file
from enginewright.backends.cpu.builder import Builder
from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.passes import calibrated, fuse_activation, insert_paged_kv, linears, quant_formats, quantise
from enginewright.passes.dialect import OPS, numerics, paged_attention, quantised_linear
from enginewright.passes.matching import picked
from enginewright.passes.program import Program
from enginewright.passes.quant_formats import QuantisedWeight, QuantTensor
from enginewright.passes.weights import Computed, Concatenated, Weight, sliced
from enginewright.runtime.engine import Engine

__all__ = ["FAULTS", "Fault"]

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """What is planted, in the build of which model and recipe, and what `--bisect` must say.

    `kind` and `where`: the pass, or the op; `op` and `module` must be among the nodes that it names. `ci`: whether it runs in CI,
    where every kind does once.
    """

    plant: Plant
    arch: str
    recipe: str
    kind: str
    where: str
    op: str = ""
    module: str = ""
    overrides: tuple[str, ...] = ()
    ci: bool = True


# In passes: a call of an op that a pass makes, with another argument.


def call_with(op: str, in_module: str = "", **changes: Callable[[tuple[Any, ...], Program], Any]) -> Plant:
    """Passes make `op` with arguments that are changed: name=function(arguments, program) -> the new value."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Program.call
        names = [argument.name for argument in OPS[op]._schema.arguments]

        def call(self: Program, target: Any, args: Any, kwargs: Any = None, **how: Any) -> Any:
            if target is OPS[op] and in_module in str(how.get("module") or ""):
                given = list(args) + [
                    argument.default_value for argument in OPS[op]._schema.arguments[len(args) :]
                ]
                for name, change in changes.items():
                    given[names.index(name)] = change(tuple(given), self)
                args = tuple(given)
            return original(self, target, args, kwargs, **how)

        patch.setattr(Program, "call", call)

    return plant


def constant(value: Any) -> Callable[[tuple[Any, ...], Program], Any]:
    return lambda args, program: value


def negated(args: tuple[Any, ...], program: Program) -> bool:
    return not args[-1]


def silu_for_gelu(patch: pytest.MonkeyPatch) -> None:
    original = fuse_activation._kind
    patch.setattr(
        fuse_activation,
        "_kind",
        lambda values, known: "gelu" if (kind := original(values, known)) == "silu" else kind,
    )


def window_plus_one(patch: pytest.MonkeyPatch) -> None:
    original = insert_paged_kv.argument

    def argument(node: Any, name: str) -> Any:
        found = original(node, name)
        return found + 1 if name == "window" and found else found

    patch.setattr(insert_paged_kv, "argument", argument)


def normed(place: int) -> Callable[[tuple[Any, ...], Program], Any]:
    """What a norm made of a sum, in the place of the sum."""

    def change(args: tuple[Any, ...], program: Program) -> Any:
        part = picked(args[place])
        if part is None or part[1] != 1:
            return args[place]
        return next(user for user in part[0].users if picked(user) == (part[0], 0))

    return change


# In rounding and joins.


def swapped_scales(patch: pytest.MonkeyPatch) -> None:
    """The scales of the first two groups of row 0 change places."""
    original = quant_formats.from_grid

    def from_grid(*args: Any) -> QuantTensor:
        found = original(*args)
        if found.scales is not None and found.scales.shape[-1] > 1:
            found.scales[..., 0, [0, 1]] = found.scales[..., 0, [1, 0]]
        return found

    patch.setattr(quant_formats, "from_grid", from_grid)


def scales_joined_the_other_way_round(patch: pytest.MonkeyPatch) -> None:
    original = linears.concatenated

    def joined(parts: Any, dim: int = 0, name: str | None = None) -> Weight:
        reverse = name is not None and name.endswith(".scales")
        return original(parts[::-1] if reverse else parts, dim, name)

    patch.setattr(linears, "concatenated", joined)


def offsets_one_group_on(patch: pytest.MonkeyPatch) -> None:
    original = quant_formats.from_grid

    def from_grid(*args: Any) -> QuantTensor:
        found = original(*args)
        return (
            found if found.offsets is None else dataclasses.replace(found, offsets=found.offsets.roll(1, -1))
        )

    patch.setattr(quant_formats, "from_grid", from_grid)


def bias_lost_in_rounding(patch: pytest.MonkeyPatch) -> None:
    call_with("quantised_linear", "o_proj", bias=constant(None))(patch)


def halves_joined_the_other_way_round(patch: pytest.MonkeyPatch) -> None:
    """The rows of every matrix that is rounded, its second half first."""
    original = quantise.QuantisedWeight

    def rounded(source: Weight, *rest: Any) -> QuantisedWeight:
        half = source.shape[0] // 2
        parts = [sliced(source, 0, half, source.shape[0]), sliced(source, 0, 0, half)]
        return original(Concatenated(parts) if source.name.startswith("lm_head") else source, *rest)

    patch.setattr(quantise, "QuantisedWeight", rounded)


def static_scale_of_other_inputs(patch: pytest.MonkeyPatch) -> None:
    """The scale was found before smoothing made the inputs smaller."""
    original = calibrated.CalibratedRounding._static_scale
    patch.setattr(
        calibrated.CalibratedRounding, "_static_scale", lambda self, inputs: 16 * original(self, inputs)
    )


# In packing and lowering.


def nibbles_the_other_way_round(patch: pytest.MonkeyPatch) -> None:
    original = pack._narrow

    def narrow(codes: Any, bits: int) -> Any:
        words = original(codes, bits)
        if bits != 4:
            return words
        return ((words & np.uint32(0x0F0F0F0F)) << np.uint32(4)) | (
            (words >> np.uint32(4)) & np.uint32(0x0F0F0F0F)
        )

    patch.setattr(pack, "_narrow", narrow)


def gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    original = weights_file.interleave_tiles
    patch.setattr(weights_file, "interleave_tiles", lambda gate, up: original(up, gate))


def buffers_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """In a program of many values, the first residual sum lies where a later value is written."""
    original = builder.plan

    def plan(buffers: Any, accesses: Any, keep: Any) -> Any:
        found = original(buffers, accesses, keep)
        offsets = list(found.offsets)
        if len(offsets) > 12:
            offsets[0] = offsets[3]
        return dataclasses.replace(found, offsets=tuple(offsets))

    patch.setattr(builder, "plan", plan)


def rope_table_one_position_on(patch: pytest.MonkeyPatch) -> None:
    original = weights_file.WeightsFile.add_table

    def add_table(self: Any, weight: Weight) -> int:
        rolled = Computed(weight.name, weight.shape, weight.dtype, lambda: weight.load().roll(-1, 0))
        return original(self, rolled)

    patch.setattr(weights_file.WeightsFile, "add_table", add_table)


def emitted(op: str, **changes: Callable[[dict[str, Any]], Any]) -> Plant:
    """An instruction of the cpu program with another attribute."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Builder.emit

        def emit(self: Any, name: str, *args: Any, **attrs: Any) -> Any:
            if name == op:
                attrs |= {key: change(attrs) for key, change in changes.items()}
            return original(self, name, *args, **attrs)

        patch.setattr(Builder, "emit", emit)

    return plant


def heads_read_other_keys(patch: pytest.MonkeyPatch) -> None:
    """The program's own attention, over a cache that is not fp32: query heads read the keys of the next key head."""
    original = paged_attention.scores
    patch.setattr(paged_attention, "scores", lambda q, k, *rest: original(q, k.roll(1, 1), *rest))


def scale_of_the_next_group(patch: pytest.MonkeyPatch) -> None:
    """The program's own rounding of activations takes each group's scale from the next one."""
    original = numerics.simulate_activation

    def simulate(x: Any, activation_format: str, activation_scale: float = 0.0) -> Any:
        if not activation_format.startswith("int8_g"):
            return original(x, activation_format, activation_scale)
        group = int(activation_format.removeprefix("int8_g"))
        values = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
        scale = (values.abs().amax(-1, keepdim=True) / 127).roll(1, -2)
        codes = (values / torch.where(scale > 0, scale, 1.0)).round().clamp(-127, 127)
        return (codes * scale).flatten(-2)[..., : x.shape[-1]]

    patch.setattr(quantised_linear, "simulate_activation", simulate)


# In the executor and the runtime.


def stepped(change: Callable[[StepInput], StepInput]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = CpuExecutor.step
        patch.setattr(CpuExecutor, "step", lambda self, step: original(self, change(step)))

    return plant


def second_page_is_the_first(step: StepInput) -> StepInput:
    """What stands in the second page is read from the first, once a later page is written."""
    tables = step.page_tables.copy()
    first = step.context_lens - np.diff(step.seq_starts)
    for sequence in np.flatnonzero(first >= 32):
        tables[:, sequence, 1] = tables[:, sequence, 0]
    return dataclasses.replace(step, page_tables=tables)


def row_before(step: StepInput) -> StepInput:
    return dataclasses.replace(step, logit_rows=np.maximum(step.logit_rows - 1, 0))


def first_page_is_the_second_in_long_texts(step: StepInput) -> StepInput:
    """Only where a sequence is longer than any sample."""
    tables = step.page_tables.copy()
    for sequence in np.flatnonzero(step.context_lens > 200):
        tables[:, sequence, 0] = tables[:, sequence, 1]
    return dataclasses.replace(step, page_tables=tables)


def changed(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    return Computed(weight.name, weight.shape, weight.dtype, lambda: change(weight.load().clone()))


def bias_twice_in_one_layer(patch: pytest.MonkeyPatch) -> None:
    """What is packed for the second layer is wrong, and for the first of its kind right."""
    original = weights_file.WeightsFile.add_vector

    def add_vector(self: Any, weight: Weight, *rest: Any) -> int:
        twice = "layers.1.self_attn.o_proj.bias" in weight.name
        return original(self, changed(weight, lambda values: 2 * values) if twice else weight, *rest)

    patch.setattr(weights_file.WeightsFile, "add_vector", add_vector)


def scales_of_one_expert(patch: pytest.MonkeyPatch) -> None:
    """Those of expert 1, two hundredths too large: few rows go there, and none is off by much."""
    original = weights_file.WeightsFile.add_linear

    def larger(values: torch.Tensor) -> torch.Tensor:
        values[1] *= 1.02
        return values

    def add_linear(self: Any, matrix: Any, gated: bool = False) -> int:
        if matrix.experts and matrix.scales is not None:
            matrix = dataclasses.replace(matrix, scales=changed(matrix.scales, larger))
        return original(self, matrix, gated)

    patch.setattr(weights_file.WeightsFile, "add_linear", add_linear)


def first_row_of_the_engine(patch: pytest.MonkeyPatch) -> None:
    """However it is asked, the runtime gives another row for the first token of a text."""
    original = Engine.logits

    def logits(self: Engine, prompts: Any, chunk_size: Any = None) -> Any:
        found = [rows.copy() for rows in original(self, prompts, chunk_size)]
        for rows in found:
            rows[0] = np.roll(rows[0], 1)
        return found

    patch.setattr(Engine, "logits", logits)


def rows_of_the_engine_shifted(patch: pytest.MonkeyPatch) -> None:
    original = Engine.logits
    patch.setattr(
        Engine,
        "logits",
        lambda self, prompts, chunk_size=None: [
            np.roll(rows, 1, 0) for rows in original(self, prompts, chunk_size)
        ],
    )


ATTENTION, LINEAR = "ew::paged_attention", "ew::quantised_linear"
FIRST = "layers.0."
SMALL = ("linear.weight=int4_g16", "linear.activation=int8_g16")  # several groups in a small model's rows

# fmt: off
FAULTS: dict[str, Fault] = {
    # Passes.
    "a rope of interleaved pairs for one of halves": Fault(
        call_with("rope", interleaved=negated), "llama", "int4", "pass", "fuse_rope", "ew::rope", FIRST + "self_attn"),
    "another eps": Fault(
        call_with("rms_norm", eps=constant(1e-3)), "llama", "int4", "pass", "fuse_rms_norm", "ew::rms_norm",
        "input_layernorm"),
    "a norm's weight without its offset": Fault(
        call_with("rms_norm", weight_offset=constant(0.0)), "gemma2", "int4",
        "pass", "fuse_rms_norm", "ew::rms_norm", "layernorm"),
    "the residual from the wrong place": Fault(
        call_with("add_rms_norm", x=normed(0), residual=normed(1)), "llama", "int8",
        "pass", "fuse_add_norm", "ew::add_rms_norm", "model.layers"),
    "another activation": Fault(
        silu_for_gelu, "llama", "int4", "pass", "fuse_activation", "ew::activation", FIRST + "mlp", ci=False),
    "a dropped soft cap": Fault(
        call_with("paged_attention", softcap=constant(0.0)), "gemma2", "int4",
        "pass", "insert_paged_kv", ATTENTION, FIRST + "self_attn"),
    "a window of one more": Fault(
        window_plus_one, "gemma2", "int8", "pass", "insert_paged_kv", ATTENTION, FIRST + "self_attn"),
    "a bias lost in rounding": Fault(
        bias_lost_in_rounding, "llama", "int4", "pass", "quantise", LINEAR, FIRST + "self_attn.o_proj"),
    "a head's rows, permuted": Fault(
        halves_joined_the_other_way_round, "llama", "int4", "pass", "quantise", LINEAR, "lm_head"),
    "a bias lost in fusion": Fault(
        call_with("linear", "v_proj", bias=constant(None)), "qwen2", "int4",
        "pass", "normalise", "ew::linear", FIRST + "self_attn.v_proj", ci=False),
    "slopes dropped": Fault(
        call_with("paged_attention", alibi=constant(None)), "bloom", "int4",
        "pass", "insert_paged_kv", ATTENTION, ".0.", ci=False),
    "a layer norm without its bias": Fault(
        call_with("layer_norm", bias=constant(None)), "gpt2", "int8", "pass", "normalise", "ew::layer_norm", ".0.", ci=False),
    # Rounding.
    "the scales of two groups, swapped": Fault(
        swapped_scales, "llama", "int4", "rounding", "quantise", "", "", SMALL),
    "joined scales in another order than their codes": Fault(
        scales_joined_the_other_way_round, "llama", "int4", "rounding", "fuse_siblings", LINEAR, FIRST),
    "offsets of the next group": Fault(
        offsets_one_group_on, "llama", "int4", "rounding", "quantise", "", "", SMALL, ci=False),
    "a static scale from before smoothing": Fault(
        static_scale_of_other_inputs, "llama", "int8-smoothquant", "rounding", "quantise", LINEAR, FIRST,
        ("linear.activation=int8_static", "calibration.samples=4", "calibration.length=64"), ci=False),
    # Packing, kernels, cache.
    "nibbles in the other order": Fault(
        nibbles_the_other_way_round, "llama", "int4", "op", LINEAR, LINEAR, FIRST + "self_attn"),
    "gate and up, swapped": Fault(
        gate_and_up_swapped, "llama", "int4", "op", "ew::gated_activation", "ew::gated_activation", FIRST + "mlp"),
    "a rope table one position on": Fault(
        rope_table_one_position_on, "llama", "int4", "op", ATTENTION, ATTENTION, FIRST + "self_attn"),
    "query heads that read the next key head": Fault(
        heads_read_other_keys, "llama", "int4", "op", ATTENTION, ATTENTION, FIRST + "self_attn"),
    "a kernel with another scale": Fault(
        emitted("attention", scale=lambda attrs: 1.02 * attrs["scale"]), "gemma2", "int4",
        "op", ATTENTION, ATTENTION, FIRST + "self_attn", ci=False),
    "a kernel without the soft cap": Fault(
        emitted("attention", softcap=lambda attrs: 0.0), "gemma2", "int4",
        "op", ATTENTION, ATTENTION, FIRST + "self_attn", ci=False),
    "activations with the scale of another group": Fault(
        scale_of_the_next_group, "llama", "int8", "op", LINEAR, LINEAR, FIRST + "self_attn"),
    "a second page read from the first": Fault(
        stepped(second_page_is_the_first), "llama", "int4", "op", ATTENTION, ATTENTION, FIRST + "self_attn"),
    "the logits of the row before": Fault(
        stepped(row_before), "llama", "int4", "op", "ew::select_rows", "ew::select_rows", ""),
    "a bias added twice in one layer": Fault(
        bias_twice_in_one_layer, "llama", "int4", "op", LINEAR, LINEAR, "layers.1.self_attn.o_proj"),
    "one expert's scales": Fault(
        scales_of_one_expert, "qwen3_moe", "int4", "op", "ew::quantised_moe", "ew::quantised_moe", FIRST + "mlp.experts"),
    "a page of long texts read from another": Fault(
        stepped(first_page_is_the_second_in_long_texts), "llama", "int4",
        "op", ATTENTION, ATTENTION, FIRST + "self_attn", ci=False),
    "buffers given back too early": Fault(
        buffers_given_back_too_early, "llama", "int4", "prefix", "add_rms_norm", "ew::add_rms_norm", "model.layers.0", ci=False),
    # The runtime.
    "the first row of every text": Fault(first_row_of_the_engine, "llama", "int4", "engine", "the engine"),
    "rows that the engine hands out one late": Fault(
        rows_of_the_engine_shifted, "llama", "int4", "engine", "the engine", "", "", ci=False),
}
# fmt: on
