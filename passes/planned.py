"""Weights that a plan knows only the names and shapes of: there may be no checkpoint at all."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from enginewright.passes.weight_names import tie
from enginewright.passes.weights import Weight

__all__ = ["PlannedWeight", "plan_weights"]


class PlannedWeight(Weight):
    """A checkpoint's tensor by name and shape. Should a pass ask for values, each tensor has one made-up value of its own.

    It is none that a rule singles out (0, 1, a power of two), and takes no memory.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype):
        self.name, self.shape, self.dtype = name, tuple(shape), dtype

    def load(self) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "little")
        value = 0.55 + 0.4 * seed / 2**32 if self.dtype.is_floating_point else 1
        return torch.tensor(value, dtype=torch.float32).to(self.dtype).expand(self.shape)


def plan_weights(model: Any) -> dict[str, Weight]:
    """A planned weight for every name in a meta model's `state_dict()`; tied as its configuration says."""
    state = model.state_dict()
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    bound: dict[str, Weight] = {
        name: PlannedWeight(name, tuple(value.shape), value.dtype)
        for name, value in state.items()
        if ties.get(name, name) == name or ties[name] not in state
    }
    tie(model, bound, {name: tuple(value.shape) for name, value in state.items()})
    return bound
