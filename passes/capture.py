"""Capture: from a model's configuration alone to an executable graph.

Rules:
1. The model is built on meta tensors in float32 (no memory for weights); only buffers that no checkpoint holds get values.
2. What cannot be captured exactly is refused by name before any work: encoder-decoders, models of several
   modalities, layers that carry a state, chunked attention, unknown rope types.
3. `torch.export` (non-strict) traces `model(tokens[1, T], positions[1, T])` with T dynamic. Attention, masks
   and experts are caught whole by the hooks of `capture_hooks.py`; a model that has its own attention is
   traced with it, and `own_attention.py` recognises it in the graph.
4. Parameters become `get_attr` nodes bound lazily to the checkpoint, a tied parameter one node. Assertions and devices vanish.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import fx

from enginewright.passes import dialect  # noqa: F401  (registers the ops)
from enginewright.passes.capture_hooks import NAME, hooked
from enginewright.passes.checkpoint import Source
from enginewright.passes.in_place import make_functional
from enginewright.passes.meta_model import build_on_meta, fake_weights, fill_buffers, first_line
from enginewright.passes.own_attention import recognise_attention
from enginewright.passes.program import ModelFacts, Program, Stage
from enginewright.passes.rope_lengths import check_rope_types, fix_rope_lengths
from enginewright.passes.source import open_source
from enginewright.passes.supported import refuse_unsupported, resolve_context
from enginewright.passes.weights import ConstantTensor, Weight
from enginewright.recipes.errors import CaptureError, EnginewrightError

__all__ = ["capture", "capture_model", "facts_of"]

_TRACED_TOKENS = 24


class _Untraceable(CaptureError):
    """torch.export failed."""


def capture(source: str | Path | Source, max_context: int | None = None) -> Program:
    """Capture a model as a Program at stage CAPTURED.

    `source` is a Hugging Face folder, a GGUF file, or an opened Source. `max_context` is the engine's limit in tokens
    (default: the model's own). Raises InputError for files that cannot be used, CaptureError for models that cannot be
    captured exactly.
    """
    if isinstance(source, (str, Path)):
        source = open_source(source)
    config = source.config
    refuse_unsupported(config)
    check_rope_types(config)
    context, notes = resolve_context(config, max_context)
    model = build_on_meta(config)
    fill_buffers(model)
    notes += fix_rope_lengths(model, context)
    weights, more = source.bind(model)
    program = capture_model(model, weights, facts_of(model, context))
    program.notes = [*notes, *more, *program.notes]
    return program


def capture_model(model: Any, weights: dict[str, Weight], facts: ModelFacts) -> Program:
    """Capture a meta model, its buffers filled, over weights by the names of its `state_dict()`. The model is used up.

    Raises CaptureError for what cannot be captured exactly.
    """
    buffers = fake_weights(model, weights)
    refused: CaptureError | None = None
    own = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    for attention in (NAME, own):
        try:
            program = to_program(trace(model, facts.max_context, attention), facts, weights, buffers)
            recognise_attention(program)
            if any(node.target is torch.ops.ew.attention.default for node in program.graph.nodes):
                return program
        except CaptureError as error:
            # The reason that counts is the one met on the way that the model supports.
            if refused is None or isinstance(refused, _Untraceable):
                refused = error
    raise refused or CaptureError(f"no attention was found in {type(model).__name__}")


class _Logits(torch.nn.Module):
    """The model as a function of tokens and positions. The model makes its own positions, as it does for its users:
    whatever it makes must turn out to depend on positions alone. The input stands for them in the graph.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False, return_dict=True).logits


def trace(model: Any, context: int, attention: str) -> torch.export.ExportedProgram:
    """Trace with 2 to `context` tokens, and with an attention implementation by name."""
    for part in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        part._attn_implementation_internal = attention
        part._experts_implementation_internal = NAME
    length = max(2, min(_TRACED_TOKENS, context - 1))
    ids = torch.zeros(1, length, dtype=torch.long)
    # One below the limit: at the limit itself a slice of a table may be the whole table, which would be another graph.
    dim = torch.export.Dim("T", min=2, max=max(context - 1, length))
    shapes = ({1: dim}, {1: dim})
    try:
        with torch.no_grad(), hooked(model, context), _quiet():
            return torch.export.export(
                _Logits(model), (ids, ids.clone()), dynamic_shapes=shapes, strict=False
            )
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, EnginewrightError):
                raise cause from error
            cause = cause.__cause__ or cause.__context__
        raise _Untraceable(
            f"{type(model).__name__} cannot be traced for a varying number of tokens",
            found=first_line(error),
        ) from error


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep transformers' and torch's advice about tracing off the screen."""
    import logging
    import warnings

    loggers = [logging.getLogger(name) for name in ("transformers", "torch.fx", "torch.export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


# From an exported program to a Program.

_DROPPED = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten._assert_async.msg,
}


def to_program(
    exported: torch.export.ExportedProgram,
    facts: ModelFacts,
    weights: dict[str, Weight],
    buffers: dict[str, torch.Tensor],
) -> Program:
    """Rewrite an exported program's inputs into `tokens`, `positions` and lazily bound weights."""
    make_functional(exported.graph)
    signature = exported.graph_signature
    state = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = getattr(signature, "inputs_to_lifted_tensor_constants", {})
    bound: dict[str, Weight] = {}
    canonical: dict[int, str] = {}
    for name, weight in weights.items():
        canonical.setdefault(id(weight), name)
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    user_inputs = iter(("tokens", "positions"))

    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name not in state and node.name not in lifted:
            values[node] = graph.placeholder(next(user_inputs))
            values[node].meta = {"val": node.meta["val"], "module": ""}
    pending: dict[str, fx.Node] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            if node in values:
                continue
            if node.name in lifted:
                name = f"constants.{lifted[node.name]}"
                weight = ConstantTensor(name, exported.constants[lifted[node.name]])
            else:
                name = state[node.name].removeprefix("model.")
                weight = _bound_weight(name, weights, buffers)
            name = canonical.setdefault(id(weight), name)
            if name not in pending:
                pending[name] = graph.create_node("get_attr", name, name=_weight_node_name(name))
                pending[name].meta = {"val": node.meta["val"], "module": name.rpartition(".")[0]}
                bound[name] = weight
            values[node] = pending[name]
        elif node.op == "call_function":
            if node.target in _DROPPED:
                continue
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise CaptureError(
                    "the trace holds a region that cannot stand in one graph",
                    found=f"{node.target} in {_module_path(node) or 'the model'}",
                )
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            if node.target is torch.ops.aten.baddbmm.default:
                values[node] = _baddbmm(graph, node, args, kwargs)
                continue
            copied = graph.call_function(node.target, args, kwargs)
            copied.meta = {"module": _module_path(node)}
            if "val" in node.meta:
                copied.meta["val"] = node.meta["val"]
            values[node] = copied
        elif node.op == "output":
            result = node.args[0]
            while isinstance(result, (list, tuple)):
                result = result[0]
            graph.output(values[result]).meta = {}
        else:
            raise CaptureError("the trace holds a node that cannot stand in one graph", found=node.op)

    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    mode = next(node.meta["val"].fake_mode for node in graph.nodes if node.op == "placeholder")
    program = Program(graph, Stage.CAPTURED, bound, facts, fake_mode=mode)
    for node in graph.nodes:
        if "val" not in node.meta and node.op == "call_function":
            program.infer(node)
    program.recompile()
    return program


def _baddbmm(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """beta · a + alpha · (b @ c), spelt out: the fused op has no shape function for a varying T."""
    aten = torch.ops.aten
    product = graph.call_function(aten.bmm.default, args[1:])
    scaled = graph.call_function(aten.mul.Tensor, (product, kwargs.get("alpha", 1)))
    bias = graph.call_function(aten.mul.Tensor, (args[0], kwargs.get("beta", 1)))
    result = graph.call_function(aten.add.Tensor, (scaled, bias))
    for made in (product, scaled, bias, result):
        made.meta = {"module": _module_path(node)}
    result.meta["val"] = node.meta["val"]
    return result


def _weight_node_name(name: str) -> str:
    return "w_" + "".join(c if c.isalnum() else "_" for c in name)


def _bound_weight(name: str, weights: dict[str, Weight], buffers: dict[str, torch.Tensor]) -> Weight:
    if name in weights:
        return weights[name]
    if name in buffers:
        return ConstantTensor(name, buffers[name])
    raise CaptureError(
        f"the model uses {name}, which is neither in the checkpoint nor computed from the configuration"
    )


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0]
    return path.removeprefix("model.") if path != "model" else ""


def facts_of(model: Any, context: int) -> ModelFacts:
    """What a meta model's configuration and parameters say; `context` is the engine's limit in tokens."""
    config = model.config
    generation = getattr(model, "generation_config", None)

    def token_ids(key: str) -> list[int]:
        found: list[int] = []
        for holder in (generation, config):
            value = getattr(holder, key, None)
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if item is not None and int(item) not in found:
                    found.append(int(item))
        return found

    bos, pad = token_ids("bos_token_id"), token_ids("pad_token_id")
    parameters = {id(p): p.numel() for p in model.parameters()}
    return ModelFacts(
        model_type=config.model_type,
        vocab_size=int(config.vocab_size),
        max_context=context,
        num_layers=int(getattr(config, "num_hidden_layers", 0)),
        hidden_size=int(config.hidden_size),
        architecture=type(model).__name__,
        eos_token_ids=token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        pad_token_id=pad[0] if pad else None,
        parameters=sum(parameters.values()),
    )
