"""The Program: an FX graph over tokens, its lazily bound weights, and the model's facts.

The graph is always executable. Placeholders are the step's inputs; `get_attr` nodes name weights, which the graph
module does not hold: `Program.weights` maps each target to a `Weight`, streamed when a node needs it. There is exactly
one `get_attr` node a weight, right after the placeholders, so a tied tensor is visibly one node with several users.

Every node carries
- `meta["val"]`: a fake tensor (shape with the symbol T for the number of tokens, dtype as executed: float32 for
  every floating tensor), and
- `meta["module"]`: the path of the module it came from, such as `model.layers.3.mlp.down_proj` (may be empty).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from enginewright.passes.weights import Weight

__all__ = ["Execution", "KvGroup", "KvLayer", "ModelFacts", "Program", "Stage"]

_HINT = 1009  # the number of tokens that shape inference imagines, where the model's context allows it


class Stage(enum.IntEnum):
    """What may stand in the graph; `legality.py` states it for each stage."""

    CAPTURED = 0
    NORMALISED = 1
    FUSED = 2
    QUANTISED = 3
    PAGED = 4
    FINAL = 5


@dataclasses.dataclass
class KvLayer:
    """One attention layer's keys and values: `kv_heads` heads of `key_dim` and `value_dim` a token, stored as `format`."""

    kv_heads: int
    key_dim: int
    value_dim: int
    name: str = ""
    format: str = "f32"


@dataclasses.dataclass
class KvGroup:
    """Layers that share a page table because they see the same `window` of tokens (0: all of them)."""

    window: int
    layers: list[KvLayer] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class ModelFacts:
    """What the engine must know about the model besides the graph. `max_context` is the engine's stated limit in tokens."""

    model_type: str
    vocab_size: int
    max_context: int
    num_layers: int
    hidden_size: int
    architecture: str = ""
    eos_token_ids: list[int] = dataclasses.field(default_factory=list)
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    parameters: int = 0
    kv_groups: list[KvGroup] = dataclasses.field(default_factory=list)


class Program:
    """A graph module, the stage it has reached, its weights by `get_attr` target, the model's facts, and notes for the user."""

    def __init__(
        self,
        graph: fx.Graph,
        stage: Stage,
        weights: Mapping[str, Weight],
        facts: ModelFacts,
        notes: Iterable[str] = (),
        fake_mode: FakeTensorMode | None = None,
    ):
        self.graph_module = fx.GraphModule(torch.nn.Module(), fx.Graph(), "Program")
        self.graph_module.graph = graph
        for node in graph.nodes:
            if node.op == "get_attr":
                self._allow_name(str(node.target))
        self.stage = stage
        self.weights = dict(weights)
        self.facts = facts
        self.notes = list(notes)
        self._fake_mode = fake_mode
        self._tokens: torch.SymInt | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def recompile(self) -> None:
        """Check the graph's structure and drop weights that no node names any more."""
        named = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        missing = named - self.weights.keys()
        if missing:
            raise ValueError(f"get_attr nodes without a weight: {sorted(map(str, missing))[:5]}")
        self.weights = {name: weight for name, weight in self.weights.items() if name in named}
        self.graph_module.recompile()

    def clone(self) -> Program:
        """An independent graph and dictionaries over the same (immutable) weights."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.graph, mapping)
        copied = graph.output(output)
        copied.meta = dict(self.graph.output_node().meta)
        facts = dataclasses.replace(
            self.facts,
            eos_token_ids=list(self.facts.eos_token_ids),
            kv_groups=[dataclasses.replace(g, layers=list(g.layers)) for g in self.facts.kv_groups],
        )
        program = Program(graph, self.stage, self.weights, facts, self.notes, self._fake_mode)
        program._tokens = self._tokens
        return program

    def replace(self, other: Program) -> None:
        """Become another form of the same model: its graph, weights and stage. Notes and facts stay."""
        self.graph_module = other.graph_module
        self.weights = other.weights
        self.stage = other.stage
        self._fake_mode, self._tokens = other._fake_mode, other._tokens

    # Weights.

    def weight_of(self, node: fx.Node) -> Weight:
        """The weight that a `get_attr` node names."""
        if node.op != "get_attr":
            raise ValueError(f"{node.name} is a {node.op} node, not a weight")
        return self.weights[str(node.target)]

    def add_weight(self, name: str, weight: Weight) -> fx.Node:
        """Register a weight under a target name and return its node. The same name twice must be the same object."""
        known = self.weights.get(name)
        if known is not None and known is not weight:
            raise ValueError(f"the program already has another weight named {name}")
        self.weights[name] = weight
        return self.weight_node(name)

    def weight_node(self, name: str) -> fx.Node:
        """The one `get_attr` node of a registered weight, made after the last input or weight when there is none yet."""
        known = self.graph.find_nodes(op="get_attr", target=name, sort=False)
        if known:
            return known[0]
        last = None
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                break
            last = node
        weight = self.weights[name]
        self._allow_name(name)
        with self.graph.inserting_after(last) if last else self.graph.inserting_before():
            node = self.graph.create_node("get_attr", name, name=_identifier(name))
        node.meta = {"val": self.fake(weight.shape, _executed(weight.dtype)), "module": _parent(name)}
        return node

    def _allow_name(self, name: str) -> None:
        """Let fx's checks find something under a weight's name, although the graph module holds no tensor."""
        top = name.partition(".")[0]
        if top not in self.graph_module._modules:
            self.graph_module.add_module(top, _AnyName())

    # Shapes.

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode in which every node's `meta["val"]` lives."""
        if self._fake_mode is None:
            self._fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        return self._fake_mode

    @property
    def tokens(self) -> torch.SymInt:
        """The symbol T: how many tokens a step has."""
        if self._tokens is None:
            for node in self.graph.nodes:
                value = node.meta.get("val") if node.op == "placeholder" else None
                if (
                    isinstance(value, torch.Tensor)
                    and value.dim()
                    and isinstance(value.shape[-1], torch.SymInt)
                ):
                    self._tokens = value.shape[-1]
                    break
            else:
                context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
                example = torch.empty(max(2, min(_HINT, self.facts.max_context - 1)), dtype=torch.int32)
                fake = self.fake_mode.from_tensor(example, symbolic_context=context)
                self._tokens = fake.shape[0]  # type: ignore[assignment]
        return self._tokens  # type: ignore[return-value]

    def fake(self, shape: Sequence[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A fake tensor of this shape; use `program.tokens` for T."""
        with self.fake_mode:
            return torch.empty(tuple(shape), dtype=dtype)

    def infer(self, node: fx.Node) -> fx.Node:
        """Set `meta["val"]` of a `call_function` node from its arguments' values, and return the node."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        return node

    def call(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        module: str | None = None,
    ) -> fx.Node:
        """Insert a call with its meta filled in.

        It goes `before` or `after` a node (default: at the end, before the output). `module` defaults to the first
        argument's that has one.
        """
        if before is None and after is None:
            before = self.graph.output_node()
        place = (
            self.graph.inserting_after(after) if after is not None else self.graph.inserting_before(before)
        )
        with place:
            node = self.graph.call_function(target, tuple(args), dict(kwargs or {}))
        if module is None:
            inputs = [n for n in node.all_input_nodes if n.op != "get_attr"] or node.all_input_nodes
            module = next((n.meta["module"] for n in inputs if n.meta.get("module")), "")
        node.meta["module"] = module
        return self.infer(node)

    # Execution.

    def run(
        self,
        tokens: Sequence[int] | torch.Tensor,
        positions: Sequence[int] | torch.Tensor | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        """Run the graph in float32 on the CPU, one node at a time, and return the logits `[T, vocab]`.

        `tokens[T]` is one sequence and `positions[T]` defaults to 0, 1, 2, …; further placeholders (a paged program's)
        are given by name. Weights are loaded at each use and freed after it; a value is freed after its last use.
        """
        dtype = torch.int64 if self.stage == Stage.CAPTURED else torch.int32
        ids = torch.as_tensor(tokens, dtype=dtype)
        where = (
            torch.arange(len(ids), dtype=dtype)
            if positions is None
            else torch.as_tensor(positions, dtype=dtype)
        )
        if self.stage == Stage.CAPTURED:
            ids, where = ids[None], where[None]
        inputs = {"tokens": ids, "positions": where, **extra}
        logits = Execution(self).evaluate(inputs)
        return logits[0] if self.stage == Stage.CAPTURED else logits

    def dump(self) -> str:
        """The graph as text: one line a node, with shape and dtype, grouped under the module it came from."""
        lines = [
            f"program: stage {self.stage.name}, {self.facts.model_type}, context {self.facts.max_context}"
        ]
        lines += [f"note: {note}" for note in self.notes]
        module = None
        for node in self.graph.nodes:
            if node.op == "get_attr":
                continue
            if node.op == "output":
                lines.append(f"return {_text(node.args[0])}")
                continue
            where = node.meta.get("module", "")
            if where != module and node.op == "call_function":
                lines.append(f"# {where or '(model)'}")
                module = where
            if node.op == "placeholder":
                lines.append(f"input {node.name}: {_type_text(node.meta.get('val'))}")
                continue
            arguments = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
            name = _target_text(node.target)
            lines.append(
                f"  {node.name}: {_type_text(node.meta.get('val'))} = {name}({', '.join(arguments)})"
            )
        return "\n".join(lines) + "\n"


class _AnyName(torch.nn.Module):
    """Answers to every attribute path."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Execution(fx.Interpreter):
    """Runs a Program node by node. A `get_attr` node's value is its `Weight`, loaded (as float32 if floating) at each use."""

    def __init__(self, program: Program):
        super().__init__(program.graph_module, garbage_collect_values=True)
        self.program = program

    def evaluate(self, inputs: Mapping[str, Any]) -> Any:
        """The output for inputs given by placeholder name; inputs the graph does not name are left unused."""
        names = [str(node.target) for node in self.program.graph.nodes if node.op == "placeholder"]
        missing = [name for name in names if name not in inputs]
        if missing:
            raise ValueError(f"the program needs {', '.join(missing)} as well")
        with torch.no_grad():
            return self.run(*[inputs[name] for name in names], enable_io_processing=False)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.program.weights[str(target)]

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        def fetch(node: fx.Node) -> Any:
            value = self.env[node]
            return executed(value) if isinstance(value, Weight) else value

        args, kwargs = fx.map_arg((n.args, n.kwargs), fetch)
        return args, kwargs


def executed(weight: Weight) -> torch.Tensor:
    """The weight's values as the graph computes: floating types as float32, integers as they are."""
    value = weight.load()
    return value.to(_executed(value.dtype))


def _executed(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _identifier(name: str) -> str:
    return "w_" + "".join(c if c.isalnum() else "_" for c in name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64:
    "i64", torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def _type_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ["T" if isinstance(size, torch.SymInt) else str(size) for size in value.shape]
        return f"{_SHORT.get(value.dtype, value.dtype)}[{', '.join(sizes)}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_type_text(item) for item in value) + ")"
    return type(value).__name__


def _text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return f"@{argument.target}" if argument.op == "get_attr" else argument.name
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_text(item) for item in argument) + "]"
    return repr(argument) if not isinstance(argument, torch.dtype) else _SHORT.get(argument, str(argument))


def _target_text(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))
