"""From a final Program to a network: `define`, by rules that are looked up by the op's name.

lower_dialect.py, lower_attention.py and lower_moe.py have the dialect's rules, lower_generic.py and lower_movement.py
those of ATen; weights.py the matrices. The network's inputs and outputs are those of bindings.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from enginewright.backends.tensorrt import bindings
from enginewright.backends.tensorrt.lower_attention import KV_FORMATS
from enginewright.backends.tensorrt.lowering import RULES, Lowering, Options
from enginewright.backends.tensorrt.weights import WEIGHT_FORMATS, activations_for
from enginewright.passes.program import Program, Stage
from enginewright.recipes.errors import LoweringError

__all__ = ["KV_FORMATS", "Lowered", "Options", "capabilities", "define"]


@dataclass
class Lowered:
    """A defined network.

    arrays: every constant's memory by the name of its layer. It must live as long as the network; where the constant's type is
    not numpy's, it holds the bytes: int4 codes two to a byte, the first in the low nibble; bf16 as uint16.
    """

    network: Any
    options: Options
    arrays: dict[str, npt.NDArray[Any]]
    inputs: list[bindings.Binding]
    outputs: list[bindings.Binding]
    notes: list[str] = field(default_factory=list)

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def capabilities() -> dict[str, Any]:
    """What this backend can lower, as data: ops by name, formats, page sizes."""
    _load_rules()
    return {
        "ops": sorted(RULES),
        "weight_formats": list(WEIGHT_FORMATS),
        "activation_formats": {name: list(activations_for(name)) for name in WEIGHT_FORMATS},
        "kv_formats": list(KV_FORMATS),
        "compute": ["f16", "bf16"],
        "page_sizes": [16, 32],
    }


def _load_rules() -> None:
    import enginewright.backends.tensorrt.lower_attention
    import enginewright.backends.tensorrt.lower_dialect
    import enginewright.backends.tensorrt.lower_generic
    import enginewright.backends.tensorrt.lower_moe
    import enginewright.backends.tensorrt.lower_movement  # noqa: F401


def define(program: Program, network: Any, options: Options | None = None) -> Lowered:
    """Define `program` in an empty network. No GPU is needed, and nothing is built.

    Raises LoweringError with every node that cannot be lowered: its op, its module and the reason.
    """
    _load_rules()
    options = options or Options()
    if program.stage != Stage.FINAL:
        raise LoweringError(
            "only a final program can be lowered", found=program.stage.name, expected=Stage.FINAL.name
        )
    facts = program.facts
    inputs = bindings.inputs(facts.kv_groups, options.page_size)
    outputs = bindings.outputs(facts.kv_groups, options.page_size, facts.vocab_size)
    low = Lowering(program, network, options)
    for binding in inputs:
        dims = [size if isinstance(size, int) else -1 for size in binding.shape]
        low.inputs[binding.name] = network.add_input(
            binding.name, low.types[binding.type], low.trt.Dims(dims)
        )
    logits = low.run()
    final = low.out(network.add_identity(logits), "logits")
    final.name = outputs[0].name
    network.mark_output(final)
    program.notes.extend(note for note in low.notes if note not in program.notes)
    return Lowered(network, options, low.arrays, inputs, outputs, low.notes)
