"""How a dialect op is declared: one schema, one plain torch reference, one shape function, under the namespace `ew`.

An op is registered with `torch.library`, so it may stand in a graph that torch.export captures, in any
`torch.fx` graph, and in plain eager code (`torch.ops.ew.<name>`). Shape functions never look at values and
never allocate real memory: they also run on meta and fake tensors with a symbolic token count.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

_library = torch.library.Library("ew", "DEF")

#: Every dialect op by its short name, in the order of definition.
OPS: dict[str, OpOverload] = {}

#: Their references, which torch can differentiate where it could not look into an op.
REFERENCES: dict[str, Callable[..., Any]] = {}


def define(schema: str, reference: Callable[..., Any], shape: Callable[..., Any]) -> OpOverload:
    """Register `ew::<schema>`; returns the overload that stands as `node.target` in graphs.

    `reference` computes the op in plain torch; `shape` returns empty tensors of the result's shape and dtype.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ew::{name}", shape, lib=_library)
    op: OpOverload = getattr(torch.ops.ew, name).default
    OPS[name] = op
    REFERENCES[name] = reference
    return op
