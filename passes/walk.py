"""The calibration walk: a Program node by node, with all samples in flight.

When the walk reaches a node, the node's inputs have been computed for every sample, through whatever was rewritten
upstream. A visitor may look at them (`Walk.inputs`) and hand back another node to stand in its place: what comes after sees
the rewritten model. So GPTQ, AWQ and SmoothQuant get a matrix's exact inputs with no hooks and no names.

Samples are laid end to end in batches; attention alone is told where one ends. Nothing is padded, so nothing has to be
left out. A value is dropped after its last use. Where the values in flight exceed `memory_bytes`, those that are
needed latest wait on disk.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.dialect import OPS, quantised_linear
from enginewright.passes.dialect.numerics import dequantise
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Program, executed

__all__ = ["Visit", "Walk"]

Visit = Callable[[fx.Node], "fx.Node | None"]
"""Called when a node's inputs are there; returns the node to evaluate in its place, or None for itself."""

Report = Callable[[str], None]

BATCH_TOKENS = 4096
_NEVER = 1 << 60


class Walk:
    """One walk of a Program (any stage from NORMALISED to QUANTISED) over token sequences.

    memory_bytes bounds the values held; batch_tokens, those computed at once (a longer sample is a batch of its own). keep:
    pairs of a node and a later one until which its value stays. report(text) is told the place and the time left.
    """

    def __init__(
        self,
        program: Program,
        sequences: Sequence[Sequence[int]],
        *,
        memory_bytes: int = 2 << 30,
        batch_tokens: int = BATCH_TOKENS,
        keep: Iterable[tuple[fx.Node, fx.Node]] = (),
        report: Report = lambda text: None,
    ) -> None:
        self.program = program
        self.report = report
        self.batches = _batches(sequences, batch_tokens)
        self._place = {node: place for place, node in enumerate(program.graph.nodes)}
        self._uses: dict[fx.Node, list[int]] = {
            node: sorted(self._place[user] for user in node.users) for node in program.graph.nodes
        }
        self._kept = list(keep)
        for node, until in self._kept:
            self._uses[node] = sorted([*self._uses[node], self._place[until]])
        self._values = _Values(memory_bytes, len(self.batches))
        self._constants: dict[fx.Node, Any] = {}
        self.peak_bytes = self.spilled_bytes = 0  # of values in flight, after `run`

    def run(self, visit: Mapping[fx.Node, Visit], whole: bool = False) -> None:
        """Walk to the last node of `visit`: node -> what to call when it is reached.

        Only what those nodes need, and what is kept for them, is computed; with `whole`, everything before them, and values
        stay that later nodes use.
        """
        try:
            self._run(visit, whole)
        finally:
            self.peak_bytes, self.spilled_bytes = self._values.peak_bytes, self._values.spilled_bytes
            self._values.close()

    def _run(self, visit: Mapping[fx.Node, Visit], whole: bool) -> None:
        order = list(self.program.graph.nodes)
        last = max((self._place[node] for node in visit), default=-1)
        needed = set(order[: last + 1]) if whole else self._needed(order[: last + 1], visit)
        started, work, done = time.perf_counter(), _work(needed), 0.0
        with torch.no_grad():
            for place, node in enumerate(order[: last + 1]):
                if node not in needed:
                    continue
                new = visit[node](node) if node in visit else None
                if new is not None and new is not node:
                    self._uses[new], self._place[new] = self._uses[node], place
                    node = new
                if self._next_use(node, place) < _NEVER:
                    self._evaluate(node, place)
                self._values.release(place, self._next_use)
                done += _cost(node)
                if node.op == "call_function" and (done > 0) and _cost(node) > 0:
                    spent = time.perf_counter() - started
                    left = spent * (work - done) / done
                    module = node.meta.get("module") or node.name
                    self.report(f"{module}, {done / work:.0%}, {left:,.0f} s left")

    def inputs(self, node: fx.Node) -> Iterator[Tensor]:
        """The value of `node`, batch by batch: [tokens of the batch, …]. Evaluated already and still in use."""
        for batch in range(len(self.batches)):
            yield self.value(node, batch)

    def value(self, node: fx.Node, batch: int) -> Any:
        """One batch's value of a node that was evaluated, or of a constant or a weight."""
        if node in self._constants:
            return self._constants[node]
        if node.op == "get_attr":
            return executed(self.program.weight_of(node))
        return self._values.get(node, batch)

    def evaluate_with(
        self,
        nodes: Sequence[fx.Node],
        batch: int,
        given: Mapping[fx.Node, Any],
        wanted: Sequence[fx.Node] | None = None,
        within: Mapping[fx.Node, Mapping[fx.Node, Any]] | None = None,
    ) -> dict[fx.Node, Any]:
        """Evaluate `nodes` (in graph order) on one batch, with `given` values of some nodes in place of their own.

        `within`: for some nodes, values that they alone see in place of their inputs' own. Returns the values of `wanted`
        (None: of all); the others are dropped after their last use.
        """
        values = dict(given)
        last = (
            {source: node for node in nodes for source in node.all_input_nodes} if wanted is not None else {}
        )
        kept = set(wanted or ())

        def value_of(node: fx.Node) -> Any:
            if node in seen:
                return seen[node]
            return values[node] if node in values else self.value(node, batch)

        for node in nodes:
            seen = (within or {}).get(node, {})
            if node not in given:
                args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
                values[node] = self._call(node, batch, args, kwargs)
            for source in node.all_input_nodes:
                if last.get(source) is node and source not in kept:
                    values.pop(source, None)
        return values

    # Evaluation.

    def _needed(self, order: Sequence[fx.Node], visit: Mapping[fx.Node, Visit]) -> set[fx.Node]:
        """The visited nodes, what is kept for them, and all that their inputs come from."""
        needed, stack = set(), [*visit, *(node for node, until in self._kept if until in visit)]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        for node in order:
            self._uses[node] = [use for use in self._uses[node] if use < len(order) and order[use] in needed]
        return needed

    def _next_use(self, node: fx.Node, place: int) -> int:
        return next((use for use in self._uses[node] if use > place), _NEVER)

    def _evaluate(self, node: fx.Node, place: int) -> None:
        if node.op == "get_attr" or node in self._constants:
            return
        if node.op == "placeholder":
            for batch, lengths in enumerate(self.batches):
                self._values.put(node, batch, lengths.input(str(node.target)), place, self._next_use)
            return
        if not any(n not in self._constants and n.op != "get_attr" for n in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value(n, 0))
            self._constants[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return
        weights: dict[fx.Node, Any] = {
            n: executed(self.program.weight_of(n)) for n in node.all_input_nodes if n.op == "get_attr"
        }
        if is_call(node, OPS["quantised_linear"]):
            self._evaluate_quantised(node, weights, place)
            return
        for batch in range(len(self.batches)):
            value = self.evaluate_with([node], batch, weights)[node]
            self._values.put(node, batch, value, place, self._next_use)

    def _evaluate_quantised(self, node: fx.Node, weights: Mapping[fx.Node, Any], place: int) -> None:
        """A quantised linear whose matrix is dequantised once for all batches."""

        def part(name: str) -> Any:
            value = argument(node, name)
            return weights[value] if isinstance(value, fx.Node) else value

        matrix = dequantise(part("codes"), part("scales"), part("offsets"), part("weight_format"))
        apart = part("outlier_columns"), part("outlier_weight")
        for batch, x in enumerate(self.inputs(argument(node, "x"))):
            y = quantised_linear.reference(
                x,
                matrix,
                None,
                None,
                part("bias"),
                "f32",
                part("activation_format"),
                *apart,
                part("activation_scale"),
            )
            self._values.put(node, batch, y, place, self._next_use)

    def _call(self, node: fx.Node, batch: int, args: Any, kwargs: Any) -> Any:
        if is_call(node, OPS["attention"]):
            return self._attention(node, batch, *args, **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _attention(
        self, node: fx.Node, batch: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any
    ) -> Tensor:
        lengths = self.batches[batch].lengths
        scale, window, softcap = (argument(node, name) for name in ("scale", "window", "softcap"))
        plain = argument(node, "sinks") is None and argument(node, "alibi") is None and not softcap
        if plain and len(set(lengths)) == 1 and q.shape[-1] == v.shape[-1]:
            return _fast_attention(q, k, v, lengths[0], scale, window)
        parts = zip(*(part.split(lengths) for part in (q, k, v)), strict=True)
        return torch.cat([node.target(*part, *rest, **named) for part in parts])  # type: ignore[operator]


def _fast_attention(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float, window: int) -> Tensor:
    """Causal attention of sequences of one length laid end to end, by torch's own kernel."""
    q, k, v = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in (q, k, v))
    mask = None
    if window and window < length:
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        mask = (distance <= 0) & (distance > -window)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1).contiguous()


class _Batch:
    """Some samples end to end."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.lengths = [len(sequence) for sequence in sequences]
        self._tokens = torch.tensor(
            [token for sequence in sequences for token in sequence], dtype=torch.int32
        )

    def input(self, name: str) -> Tensor:
        if name == "tokens":
            return self._tokens
        return torch.cat([torch.arange(length, dtype=torch.int32) for length in self.lengths])


def _batches(sequences: Sequence[Sequence[int]], most: int) -> list[_Batch]:
    batches: list[_Batch] = []
    current: list[Sequence[int]] = []
    for sequence in sequences:
        if current and sum(map(len, current)) + len(sequence) > most:
            batches.append(_Batch(current))
            current = []
        current.append(sequence)
    return [*batches, _Batch(current)] if current else batches


def _cost(node: fx.Node) -> float:
    """Multiplications a token, roughly: those by weights."""
    if node.op != "call_function":
        return 0.0
    sizes = [n.meta["val"].numel() for n in node.all_input_nodes if n.op == "get_attr"]
    return float(max(sizes, default=0)) if is_call(node, OPS["linear"], OPS["moe"], *_QUANTISED) else 0.0


_QUANTISED = (OPS["quantised_linear"], OPS["quantised_moe"])


def _work(nodes: Iterable[fx.Node]) -> float:
    return sum(map(_cost, nodes)) or 1.0


class _Values:
    """Values in flight, by node and batch; beyond a limit those used latest lie in files."""

    def __init__(self, memory_bytes: int, batches: int) -> None:
        self.limit = memory_bytes
        self.count = batches
        self.held: dict[fx.Node, list[Any]] = {}
        self.bytes = 0
        self.peak_bytes = 0
        self.spilled_bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def put(
        self, node: fx.Node, batch: int, value: Any, place: int, next_use: Callable[[fx.Node, int], int]
    ) -> None:
        self.held.setdefault(node, [None] * self.count)[batch] = value
        self.bytes += _size(value)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        if self.bytes > self.limit:
            self._spill(place, next_use)

    def get(self, node: fx.Node, batch: int) -> Any:
        value = self.held[node][batch]
        return torch.load(value, weights_only=True) if isinstance(value, Path) else value

    def release(self, place: int, next_use: Callable[[fx.Node, int], int]) -> None:
        """Drop what no later node uses."""
        for node in [node for node in self.held if next_use(node, place) == _NEVER]:
            for value in self.held.pop(node):
                if isinstance(value, Path):
                    value.unlink()
                else:
                    self.bytes -= _size(value)

    def _spill(self, place: int, next_use: Callable[[fx.Node, int], int]) -> None:
        """Write values to disk, the one used latest first, until the limit is kept; the newest batch stays."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="enginewright-calibration-")
        for node in sorted(self.held, key=lambda node: -next_use(node, place)):
            for batch in reversed(range(self.count)):
                value = self.held[node][batch]
                if value is None or isinstance(value, Path):
                    continue
                if self.bytes <= self.limit:
                    return
                path = Path(self._folder.name) / f"{id(node)}-{batch}.pt"
                torch.save(value if not isinstance(value, Tensor) else value.clone(), path)
                self.held[node][batch] = path
                self.bytes -= _size(value)
                self.spilled_bytes += _size(value)

    def close(self) -> None:
        self.held.clear()
        self.bytes = 0
        if self._folder is not None:
            self._folder.cleanup()


def _size(value: Any) -> int:
    """Bytes that a value keeps alive: views count as what they are views of, once a value."""
    if isinstance(value, (list, tuple)):
        return sum(_size(item) for item in value)
    return int(value.nbytes) if isinstance(value, Tensor) else 0
