"""What an engine would store, told without writing it: one entry a stored weight, from a Program whose weights are not read.

A backend that can say it exactly has a method `planned` (`Plans`). For any other, and for no backend at all, `by_formats`
counts what the formats' codes and tables take: no padding, no alignment, no file's header.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from enginewright.recipes.errors import LoweringError

if TYPE_CHECKING:
    from enginewright.backends.base import Backend
    from enginewright.passes.program import Program

__all__ = ["Planned", "Plans", "StoredWeight", "by_formats", "plan_for"]


@dataclass(frozen=True)
class StoredWeight:
    """One stored tensor: its format, its bytes as stored, the checkpoint's tensors it is made of, and what it is: a `matrix`,
    a `table` by position, or a `vector` (norms, biases, constants)."""

    kind: str
    format: str
    bytes: int
    leaves: frozenset[str]


@dataclass(frozen=True)
class Planned:
    """The stored weights, and what the backend refuses, each with the module that it stands in. `exact`: whether the bytes
    are those of the files that `lower` would write."""

    stored: list[StoredWeight]
    refused: list[tuple[str, LoweringError]]
    exact: bool


@runtime_checkable
class Plans(Protocol):
    """A backend that can say what it would store."""

    def planned(self, program: Program) -> Planned:
        """What `lower` would write for a program at the backend's stage. No weight's values are read."""


def plan_for(backend: Backend | None, program: Program) -> Planned:
    """What a backend would store of a program at its stage, as exactly as it can say; without one, what the formats take."""
    if isinstance(backend, Plans):
        return backend.planned(program)
    planned = by_formats(program)
    if backend is not None:
        planned.refused.extend(_unknown(backend, program))
    return planned


def _unknown(backend: Backend, program: Program) -> list[tuple[str, LoweringError]]:
    """Every op on tokens that a backend's capabilities do not name."""
    import torch

    known: list[str] = list(backend.capabilities.get("ops", ()))
    refused: dict[tuple[str, str], LoweringError] = {}
    for node in program.graph.nodes if known else ():
        schema = getattr(node.target, "_schema", None)
        values = node.meta.get("val")
        several = values if isinstance(values, (list, tuple)) else [values]
        on_tokens = any(
            isinstance(size, torch.SymInt) for v in several if isinstance(v, torch.Tensor) for size in v.shape
        )
        if node.op == "call_function" and schema is not None and schema.name not in known and on_tokens:
            module = node.meta.get("module", "")
            refused[schema.name, module] = LoweringError(
                f"the {backend.name} backend cannot lower {schema.name}",
                expected="one of " + ", ".join(sorted(known)),
            )
    return [(module, error) for (_, module), error in refused.items()]


def by_formats(program: Program) -> Planned:
    """What the formats of a program's weights take, in whole bytes a tensor."""
    from enginewright.passes import dialect
    from enginewright.passes.matching import argument
    from enginewright.recipes.formats import parse_weight

    bits: dict[str, tuple[str, int]] = {}
    tables: set[str] = set()
    for node in program.graph.nodes:
        op = dialect.name_of(node.target) if node.op == "call_function" else None
        if op == "position_table":
            tables.add(str(argument(node, "table").target))
        if op in ("linear", "moe", "embedding"):
            for name in ("gate_up", "down") if op == "moe" else ("weight",):
                bits[str(argument(node, name).target)] = "f32", 32
        if op not in ("quantised_linear", "quantised_moe", "quantised_embedding"):
            continue
        form = parse_weight(argument(node, "weight_format"))
        for prefix in ("gate_up_", "down_") if op == "quantised_moe" else ("",):
            for part in ("codes", "scales", "offsets"):
                found = argument(node, f"{prefix}{part}")
                if found is not None:
                    wide = form.bits if part == "codes" else 16 if form.half_scales else 32
                    bits[str(found.target)] = form.name, wide
    stored = []
    for target, weight in program.weights.items():
        kind = "matrix" if target in bits else "table" if target in tables else "vector"
        name, wide = bits.get(target, ("f32" if weight.dtype.is_floating_point else "i32", 32))
        leaves = frozenset(leaf.name for leaf in weight.leaves())
        stored.append(StoredWeight(kind, name, -(-weight.numel * wide // 8), leaves))
    return Planned(stored, [], exact=False)
