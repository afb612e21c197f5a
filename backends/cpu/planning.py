"""What weights.bin would hold, from lowering alone: entries have their sizes before anything is written.

Lowering goes on after what it refuses, with a made-up value in its place, so that all refusals are found.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from enginewright.backends.cpu.lowering import Lowering
from enginewright.backends.cpu.weights_file import WeightsFile
from enginewright.backends.planning import Planned
from enginewright.passes.program import Program
from enginewright.recipes.errors import LoweringError

__all__ = ["planned"]

_UNKNOWN = object()


def planned(program: Program) -> Planned:
    """The entries of weights.bin for a final program, each with the padding to the next one's place, and every refusal."""
    weights = WeightsFile()
    lowering = _Lenient(program, weights)
    try:
        lowering.run()
    except LoweringError as error:  # what follows the last node that could be lowered
        if not lowering.refused:
            lowering.refused.append(("", error))
    return Planned(weights.planned(), lowering.refused, exact=True)


class _Lenient(Lowering):
    """A lowering that notes what it cannot lower."""

    def __init__(self, program: Program, weights: WeightsFile) -> None:
        super().__init__(program, weights)
        self.refused: list[tuple[str, LoweringError]] = []

    def _call(self, node: fx.Node) -> Any:
        if any(self.results.get(source) is _UNKNOWN for source in node.all_input_nodes):
            return _UNKNOWN
        try:
            return super()._call(node)
        except LoweringError as error:
            self.refused.append((node.meta.get("module", ""), error))
        try:
            return self._stand_in(node)
        except (LoweringError, AttributeError, TypeError):
            return _UNKNOWN

    def _stand_in(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        if not isinstance(value, (list, tuple)):
            return self.out(node)
        return tuple(self.out(node, self.shape(node, i), self.dtype(node, i)) for i in range(len(value)))
