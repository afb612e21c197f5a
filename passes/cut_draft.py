"""cut_draft — a draft of the model: its first N attention layers, then its own last norm and head.

A model of residual layers hands one value from layer to layer: the sum that everything later reads the tokens through.
Where N layers are done, that sum goes to the last norm and the head at once (early exit; Elhoushi et al. 2024, "LayerSkip",
§3.3). So the draft's keys and values of layers 1 … N are those that the model itself writes.

Rules (attention nodes in order are the layers 1 … L; 1 ≤ N < L)
1. A *boundary* is a sum x + residual of two activations [T, D], alone or with a norm (ew::add_rms_norm,
   ew::add_layer_norm), such that every path from the tokens to what stands after it leads through it. What follows from
   positions and weights alone may pass beside it.
2. The boundary after layer N is the last one between attention N and attention N + 1, the model's is the last one after
   attention L. Where either is missing, the model cannot be cut.
3. The model's boundary takes the terms of the boundary after N in place of its own, at the rows that are wanted; the norm,
   its weights and what follows stay the model's. What nothing reads any more is removed; inputs and KV groups stay as they are.

4. With a draft head (distil.py), the sum s after layer N is mapped first: the model's boundary takes M · s + m and s as terms.

In a model that norms each layer's sum for the next layer (post-norm), the norm before the head is the last layer's.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes import legality
from enginewright.passes.dialect import OPS
from enginewright.passes.manager import PassResult, remove_dead_code
from enginewright.passes.matching import is_call, picked
from enginewright.passes.program import Program, Stage
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.errors import InputError, LoweringError

__all__ = [
    "CanDraft",
    "DraftHead",
    "boundaries",
    "check_layers",
    "chosen_rows",
    "cut_draft",
    "cuts",
    "sum_of",
]

_SUMS = (torch.ops.aten.add.Tensor, OPS["add_rms_norm"], OPS["add_layer_norm"])


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """A map of the sum that goes to the last norm: s + matrix · s + bias. matrix [D, D], bias [D], float32."""

    matrix: Tensor
    bias: Tensor

    def apply(self, states: Tensor) -> Tensor:
        """Map states [T, D]."""
        return states + torch.nn.functional.linear(states, self.matrix, self.bias)


class CanDraft:
    """Changes nothing; refuses a model that could not be cut after `layers` layers, before any long work."""

    name = "can_draft"

    def __init__(self, layers: int) -> None:
        self.options: Mapping[str, Any] = {"layers": layers}

    def run(self, program: Program) -> PassResult:
        boundaries(program.graph, self.options["layers"])
        return PassResult(1)


def cut_draft(program: Program, layers: int, head: DraftHead | None = None) -> Program:
    """A new final Program of the first `layers` layers, over the same weights; `program` is not changed.

    `head` is stored in bf16 with its bias in f32. Raises InputError where the model has too few layers, LoweringError
    where it has no boundaries.
    """
    if program.stage != Stage.FINAL:
        raise LoweringError(
            "a draft is cut from a final program", found=program.stage.name, expected=Stage.FINAL.name
        )
    draft = program.clone()
    early, last = boundaries(draft.graph, layers)
    rows = _terms(last)[0].meta["val"].shape[0]
    terms = _terms(early) if head is None else [sum_of(draft, early)]
    terms = [chosen_rows(draft, term, rows, before=last) for term in terms]
    if head is not None:
        matrix = draft.add_weight(
            "draft_head.weight", ConstantTensor("draft_head.weight", head.matrix.bfloat16())
        )
        bias = draft.add_weight("draft_head.bias", ConstantTensor("draft_head.bias", head.bias))
        args = (terms[0], matrix, None, None, bias, "bf16", "bf16")
        terms.insert(0, draft.call(OPS["quantised_linear"], args, before=last, module="draft_head"))
    last.args = (*terms, *last.args[2:])
    remove_dead_code(draft)
    draft.facts = dataclasses.replace(draft.facts, num_layers=layers)
    draft.recompile()
    legality.check(draft, ["cut_draft"])
    return draft


def sum_of(program: Program, boundary: fx.Node) -> fx.Node:
    """A boundary's sum [T, D] as a node: itself, or the second result of a fused norm."""
    if is_call(boundary, torch.ops.aten.add.Tensor):
        return boundary
    results = (user for user in boundary.users if picked(user) == (boundary, 1))
    found = next(results, None)
    if found is not None:
        return found
    return program.call(operator.getitem, (boundary, 1), after=boundary)


def chosen_rows(program: Program, value: fx.Node, rows: object, before: fx.Node) -> fx.Node:
    """`value` at the wanted rows, where it does not have `rows` rows already."""
    if value.meta["val"].shape[0] == rows:
        return value
    wanted = next(n for n in program.graph.nodes if n.op == "placeholder" and n.target == "logit_rows")
    return program.call(OPS["select_rows"], (value, wanted), before=before, module=value.meta.get("module"))


def check_layers(layers: int, of: int) -> None:
    """Refuse a draft of `layers` layers where the model has `of`."""
    if not 1 <= layers < of:
        raise InputError(
            "the draft cannot have that many layers",
            found=f"draft.layers={layers}, and the model has {of} layers",
            expected=f"1 to {of - 1}" if of > 1 else "a model of at least 2 layers",
            action="set draft.layers to fewer, or to 0 for an engine without a draft",
        )


def boundaries(graph: fx.Graph, layers: int) -> tuple[fx.Node, fx.Node]:
    """The boundary after layer `layers`, and the model's own."""
    attentions = [node for node in graph.nodes if is_call(node, OPS["attention"], OPS["paged_attention"])]
    check_layers(layers, len(attentions))
    places = {node: place for place, node in enumerate(graph.nodes)}
    sums = [(places[node], node) for node in cuts(graph) if _is_sum(node)]

    def between(start: fx.Node, stop: int, where: str) -> fx.Node:
        found = [node for place, node in sums if places[start] < place < stop]
        if not found:
            raise LoweringError(
                f"no draft can be cut from this model: {where} no sum stands alone between what is before and after it",
                found="values that pass beside every residual sum, or layers without one",
                expected="layers that hand on x + residual, and nothing else that depends on the tokens",
                action="set draft.layers=0, or draft with n-grams or another engine",
            )
        return found[-1]

    early = between(attentions[layers - 1], places[attentions[layers]], f"after layer {layers}")
    last = between(attentions[-1], len(places), "after the last layer")
    mine, its = (_terms(node)[0].meta["val"].shape[1:] for node in (early, last))
    if mine != its:
        raise LoweringError(
            "no draft can be cut from this model: its layers hand on values of different widths",
            found=f"{list(mine)} after layer {layers}, {list(its)} after the last",
            expected="one width",
        )
    return early, last


def cuts(graph: fx.Graph) -> list[fx.Node]:
    """The nodes through which every path from the tokens to the output leads, in order."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    fed: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if (node.op == "placeholder" and node.target == "tokens") or any(
            source in fed for source in node.all_input_nodes
        ):
            fed[node] = None
    found, reach = [], 0  # the last place that reads a value from before
    for node in fed:
        if reach <= places[node]:
            found.append(node)
        reach = max([reach, *(places[user] for user in node.users)])
    return found


def _is_sum(node: fx.Node) -> bool:
    """Whether the node adds two activations [T, D] of one shape."""
    if not is_call(node, *_SUMS) or "alpha" in node.kwargs:
        return False
    terms = _terms(node)
    if len(terms) < 2 or any(term.op == "get_attr" for term in terms):
        return False
    x, residual = (term.meta["val"].shape for term in terms)
    return len(x) == 2 and x == residual


def _terms(node: fx.Node) -> list[fx.Node]:
    """What a sum adds, as far as it is no number."""
    return [term for term in node.args[:2] if isinstance(term, fx.Node)]
