"""What may stand in the graph at which stage, as data, and the check that runs between all passes.

Four tables: `PER_TOKEN` (the closed list of ATen ops), `SPAN` (first and last stage of each dialect op),
`ATTRIBUTES` (allowed values of attributes) and `INPUTS` (the placeholders of each stage). From NORMALISED on
the token axis is the first axis of every activation, the other sizes are numbers, and no ATen op reduces,
joins, moves or splits the token axis: only the attention ops may look at another token.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from enginewright.passes import dialect
from enginewright.passes.dialect.activation import ACTIVATIONS
from enginewright.passes.dialect.paged_attention import KV_FORMATS
from enginewright.passes.program import Program, Stage
from enginewright.recipes.errors import LoweringError
from enginewright.recipes.formats import ACTIVATION_FORMATS, WEIGHT_FORMATS

__all__ = ["ATTRIBUTES", "INPUTS", "PER_TOKEN", "SPAN", "check"]

#: ATen ops of a normalised graph, by the name of the overload packet: they work inside a token's row.
_PER_TOKEN = {
    "one input": """abs acos asin atan bitwise_not ceil clamp clamp_max clamp_min cos cosh elu erf exp exp2
    expm1
        fill floor gelu hardsigmoid hardswish hardtanh isinf isnan leaky_relu log log10 log1p log2
        log_sigmoid_forward logical_not mish neg reciprocal relu relu6 round rsqrt sigmoid sign silu sin sinh
        softplus sqrt square tan tanh trunc""",
    "several inputs": """add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor div eq floor_divide fmod
    ge
        gt le lerp logical_and logical_or logical_xor lt masked_fill maximum minimum mul ne pow remainder rsub
        sub where""",
    "along feature axes": """_fused_rms_norm _log_softmax _softmax all amax amin any argmax argmin argsort
    cumprod
        cumsum layer_norm log_softmax logsumexp max mean min native_group_norm native_layer_norm prod rms_norm
        softmax sort sum topk var""",
    "products inside a row": "bmm matmul",
    "movement inside a row": """_to_copy _unsafe_view alias cat chunk clone constant_pad_nd contiguous expand
        expand_as flatten flip gather index_select narrow pad permute repeat repeat_interleave reshape roll
        scatter scatter_add select slice split split_with_sizes squeeze stack to transpose unbind unflatten
        unsqueeze view""",
    "constants": """arange empty_like full full_like new_full new_ones new_zeros one_hot ones ones_like
        scalar_tensor zeros zeros_like""",
}
PER_TOKEN = frozenset(name for names in _PER_TOKEN.values() for name in names.split())

_FIRST, _LAST = Stage.CAPTURED, Stage.FINAL

#: Dialect op -> the first and the last stage at which it may stand.
SPAN: dict[str, tuple[Stage, Stage]] = {
    "attention": (_FIRST, Stage.QUANTISED),
    "moe": (_FIRST, _LAST),
    "embedding": (Stage.NORMALISED, _LAST),
    "position_table": (Stage.NORMALISED, _LAST),
    "linear": (Stage.NORMALISED, _LAST),
    "rms_norm": (Stage.NORMALISED, _LAST),
    "layer_norm": (Stage.NORMALISED, _LAST),
    "activation": (Stage.NORMALISED, _LAST),
    "rope": (Stage.FUSED, _LAST),
    "add_rms_norm": (Stage.FUSED, _LAST),
    "add_layer_norm": (Stage.FUSED, _LAST),
    "gated_activation": (Stage.FUSED, _LAST),
    "quantised_embedding": (Stage.QUANTISED, _LAST),
    "quantised_linear": (Stage.QUANTISED, _LAST),
    "quantised_moe": (Stage.QUANTISED, _LAST),
    "paged_attention": (Stage.PAGED, _LAST),
    "select_rows": (Stage.FINAL, _LAST),
}

_NOT_NEGATIVE: Callable[[Any], bool] = lambda value: value >= 0  # noqa: E731
_POSITIVE: Callable[[Any], bool] = lambda value: value > 0  # noqa: E731

#: Dialect op -> attribute -> the allowed values, or a test of one value.
ATTRIBUTES: dict[str, dict[str, Sequence[Any] | Callable[[Any], bool]]] = {
    "activation": {"kind": tuple(ACTIVATIONS)},
    "gated_activation": {"activation": tuple(ACTIVATIONS)},
    "moe": {"activation": (*ACTIVATIONS, "swiglu_oai"), "limit": _NOT_NEGATIVE},
    "quantised_moe": {
        "activation": (*ACTIVATIONS, "swiglu_oai"),
        "limit": _NOT_NEGATIVE,
        "weight_format": WEIGHT_FORMATS,
        "activation_format": ACTIVATION_FORMATS,
    },
    "quantised_linear": {
        "weight_format": WEIGHT_FORMATS,
        "activation_format": ACTIVATION_FORMATS,
        "activation_scale": _NOT_NEGATIVE,
    },
    "quantised_embedding": {"weight_format": WEIGHT_FORMATS, "offset": _NOT_NEGATIVE},
    "embedding": {"offset": _NOT_NEGATIVE},
    "rms_norm": {"eps": _NOT_NEGATIVE, "weight_offset": (0.0, 1.0)},
    "add_rms_norm": {"eps": _NOT_NEGATIVE, "weight_offset": (0.0, 1.0)},
    "layer_norm": {"eps": _NOT_NEGATIVE},
    "add_layer_norm": {"eps": _NOT_NEGATIVE},
    "rope": {"rotary_dim": lambda value: value > 0 and value % 2 == 0},
    "attention": {
        "scale": _POSITIVE,
        "window": _NOT_NEGATIVE,
        "softcap": _NOT_NEGATIVE,
        "layer": _NOT_NEGATIVE,
    },
    "paged_attention": {
        "scale": _POSITIVE,
        "window": _NOT_NEGATIVE,
        "softcap": _NOT_NEGATIVE,
        "group": _NOT_NEGATIVE,
        "layer": _NOT_NEGATIVE,
        "kv_format": KV_FORMATS,
    },
}

#: Placeholders from the stage on; a paged graph also has `key_pool_<group>_<layer>` and
#: `value_pool_<group>_<layer>`.
INPUTS: dict[str, Stage] = {
    "tokens": Stage.CAPTURED,
    "positions": Stage.CAPTURED,
    "seq_starts": Stage.PAGED,
    "context_lens": Stage.PAGED,
    "page_tables": Stage.PAGED,
    "logit_rows": Stage.FINAL,
}
_POOLS = ("key_pool_", "value_pool_")

#: Names of the arguments of ATen ops that say along which axes they work.
_AXES = ("dim", "dims", "dim0", "dim1", "axis")
#: Ops whose output may have another first axis than their input's, if it is again the tokens.
_RESHAPES = frozenset(("view", "reshape", "_unsafe_view", "expand", "repeat"))


def check(program: Program, ran: Sequence[str] = ()) -> None:
    """Raise LoweringError at the first node that may not stand at `program.stage`; `ran` names the passes so far."""
    earlier: set[fx.Node] = set()
    for node in program.graph.nodes:
        fault = _fault(node, program.stage)
        if fault is None and not earlier.issuperset(node.all_input_nodes):
            fault = "an argument stands later in the graph"
        earlier.add(node)
        if fault is not None:
            module = node.meta.get("module") or "(model)"
            raise LoweringError(
                f"illegal graph at stage {program.stage.name}: {fault}",
                found=f"node `{node.format_node() or node.name}` of module `{module}`",
                expected="only the ops and attributes that passes/legality.py lists for this stage",
                action=f"look at the last pass that ran; so far: {', '.join(ran) or 'none'}",
            )


def _fault(node: fx.Node, stage: Stage) -> str | None:
    """Why the node is illegal, or None."""
    if node.op == "placeholder":
        return _input_fault(str(node.target), stage)
    if node.op in ("get_attr", "output"):
        return None
    if node.op != "call_function":
        return f"a `{node.op}` node may not stand in a Program"
    if node.target is operator.getitem:
        return None
    name = dialect.name_of(node.target)
    if name is not None:
        return _dialect_fault(node, name, stage)
    if stage == Stage.CAPTURED:
        return None
    return _aten_fault(node)


def _input_fault(name: str, stage: Stage) -> str | None:
    if name.startswith(_POOLS):
        return None if stage >= Stage.PAGED else f"the pool `{name}` comes with stage PAGED"
    if name not in INPUTS:
        return f"unknown input `{name}`"
    return None if stage >= INPUTS[name] else f"input `{name}` comes with stage {INPUTS[name].name}"


def _dialect_fault(node: fx.Node, name: str, stage: Stage) -> str | None:
    first, last = SPAN[name]
    if not first <= stage <= last:
        return f"ew::{name} may stand from {first.name} to {last.name} only"
    allowed = ATTRIBUTES.get(name, {})
    for attribute, value in _arguments(node).items():
        rule = allowed.get(attribute)
        if rule is None:
            continue
        if not (rule(value) if callable(rule) else value in rule):
            choices = "" if callable(rule) else f"; allowed: {', '.join(map(str, rule))}"
            return f"ew::{name} with {attribute} = {value!r}{choices}"
    return None


def _aten_fault(node: fx.Node) -> str | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return f"`{target}` is neither an ATen op nor of the dialect"
    name = target._schema.name.removeprefix("aten::")
    if name not in PER_TOKEN:
        return f"aten::{name} is not on the list of per-token ops"
    if not any(_has_tokens(source) for source in node.all_input_nodes):
        return None  # a constant expression: no token axis to keep
    for value in _tensors(node):
        if not value.dim() or not isinstance(value.shape[0], torch.SymInt):
            return f"aten::{name} loses the token axis: its result is {list(value.shape)}"
        if any(isinstance(size, torch.SymInt) for size in value.shape[1:]):
            return f"aten::{name} has a feature axis of unknown size: {list(value.shape)}"
    if name not in _RESHAPES and _works_on_tokens(node):
        return f"aten::{name} works along the token axis"
    return None


def _works_on_tokens(node: fx.Node) -> bool:
    """Whether an axis argument of the node names axis 0 of its (first) tensor input."""
    first = next((n for n in node.all_input_nodes if _has_tokens(n)), None)
    rank = (
        first.meta["val"].dim() if first is not None and isinstance(first.meta["val"], torch.Tensor) else None
    )
    if rank is None:
        return False
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    for argument, value in _arguments(node).items():
        if argument not in _AXES or value is None:
            continue
        if name == "permute":
            return value[0] % rank != 0
        if name in ("unsqueeze", "stack"):
            return value % (rank + 1) == 0
        axes = value if isinstance(value, (list, tuple)) else [value]
        return any(axis % rank == 0 for axis in axes)
    return False


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Argument name -> value, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values.update({a.name: value for a, value in zip(schema.arguments, node.args, strict=False)})
    values.update(node.kwargs)
    return values


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _has_tokens(node: fx.Node) -> bool:
    return any(v.dim() and isinstance(v.shape[0], torch.SymInt) for v in _tensors(node))
