"""The dialect: the custom ops `ew::*` that stand in graphs beside ATen ops, one file an op.

Importing this package registers them all. `dialect.OPS` maps the short name to the overload that stands as
`node.target`; `name_of(target)` is its inverse.
"""

from typing import Any

from . import (
    activation,
    add_layer_norm,
    add_rms_norm,
    attention,
    embedding,
    gated_activation,
    layer_norm,
    linear,
    moe,
    paged_attention,
    position_table,
    quantised_embedding,
    quantised_linear,
    quantised_moe,
    rms_norm,
    rope,
    select_rows,
)
from .registry import OPS

__all__ = ["OPS", "name_of"]

_NAMES = {op: name for name, op in OPS.items()}
_MODULES = (
    activation,
    add_layer_norm,
    add_rms_norm,
    attention,
    embedding,
    gated_activation,
    layer_norm,
    linear,
    moe,
    paged_attention,
    position_table,
    quantised_embedding,
    quantised_linear,
    quantised_moe,
    rms_norm,
    rope,
    select_rows,
)


def name_of(target: Any) -> str | None:
    """'linear' for torch.ops.ew.linear.default; None for anything that is not of the dialect."""
    return _NAMES.get(target)
