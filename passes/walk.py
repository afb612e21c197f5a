"""The calibration walk: a Program node by node, with all samples in flight.

When the walk reaches a node, the node's inputs have been computed for every sample, through whatever was rewritten
upstream. A visitor may look at them (`Walk.inputs`) and hand back another node to stand in its place: what comes after sees
the rewritten model. So GPTQ, AWQ and SmoothQuant get a matrix's exact inputs with no hooks and no names.

Samples are laid end to end in batches; attention alone is told where one ends. Nothing is padded, so nothing has to be
left out. The nodes between two visits are computed batch by batch, so that of what lies between them only one batch is
ever held. A value is dropped after its last use. Where the values in flight exceed `memory_bytes`, those that are
needed latest wait on disk.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.numerics import dequantise, simulate_activation
from enginewright.passes.matching import argument, is_call
from enginewright.passes.products import bfloat16_factors
from enginewright.passes.program import Program, executed
from enginewright.recipes.errors import InputError

__all__ = ["Visit", "Walk", "no_room", "save_aside"]

Visit = Callable[[fx.Node], "fx.Node | None"]
"""Called when a node's inputs are there; returns the node to evaluate in its place, or None for itself."""

Report = Callable[[str], None]

BATCH_TOKENS = 4096
TRIM_BYTES = 128 << 20  # of values dropped, after which freed memory goes back to the system
_NEVER = 1 << 60


class Walk:
    """One walk of a Program (any stage from NORMALISED to QUANTISED) over token sequences.

    memory_bytes bounds the values held; batch_tokens, those computed at once (a longer sample is a batch of its own). keep:
    pairs of a node and a later one until which its value stays. quick: products have bfloat16 factors (products.py).
    report(text) is told the place and the time left.
    """

    def __init__(
        self,
        program: Program,
        sequences: Sequence[Sequence[int]],
        *,
        memory_bytes: int = 2 << 30,
        batch_tokens: int = BATCH_TOKENS,
        keep: Iterable[tuple[fx.Node, fx.Node]] = (),
        quick: bool = False,
        report: Report = lambda text: None,
    ) -> None:
        self.program = program
        self.report = report
        self._quick = quick
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

    def run(self, visit: Mapping[fx.Node, Visit], *, whole: bool = False, own_inputs: bool = False) -> None:
        """Walk to the last node of `visit`: node -> what to call when it is reached.

        Only what those nodes need, and what is kept for them, is computed; with `whole`, everything before them, and values
        stay that later nodes use. With `own_inputs`, a visitor looks at nothing but its node's inputs: what it does not need
        yet is then computed later, in one go with what follows, and takes no memory meanwhile.
        """
        try:
            self._run(visit, whole, own_inputs)
        finally:
            self.peak_bytes, self.spilled_bytes = self._values.peak_bytes, self._values.spilled_bytes
            self._values.close()

    def _run(self, visit: Mapping[fx.Node, Visit], whole: bool, own_inputs: bool) -> None:
        order = list(self.program.graph.nodes)
        last = max((self._place[node] for node in visit), default=-1)
        needed = set(order[: last + 1]) if whole else self._needed(order[: last + 1], visit)
        started, work, done = time.perf_counter(), _work(needed), 0.0
        waiting: dict[fx.Node, None] = {}  # reached and not computed yet
        with torch.no_grad():
            for place, node in enumerate(order[: last + 1]):
                if node not in needed:
                    continue
                if node in visit:
                    if not own_inputs or any(source in waiting for source in node.all_input_nodes):
                        self._compute(list(waiting), place)
                        waiting.clear()
                    new = visit[node](node)
                    if new is not None and new is not node:
                        self._uses[new], self._place[new] = self._uses[node], place
                        node = new
                if self._next_use(node, place) < _NEVER and not self._is_given(node, place):
                    waiting[node] = None
                done += _cost(node)
                if _cost(node) > 0:
                    spent = time.perf_counter() - started
                    module = node.meta.get("module") or node.name
                    self.report(f"{module}, {done / work:.0%}, {spent * (work - done) / done:,.0f} s left")

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
        dense: Mapping[fx.Node, Tensor] | None = None,
    ) -> dict[fx.Node, Any]:
        """Evaluate `nodes` (in graph order) on one batch, with `given` values of some nodes in place of their own.

        `within`: for some nodes, values that they alone see in place of their inputs' own. Returns the values of `wanted`
        (None: of all); the others are dropped after their last use. `dense`: the dequantised matrices of quantised linears.
        """
        values = dict(given)
        last = (
            {source: node for node in nodes for source in node.all_input_nodes} if wanted is not None else {}
        )
        kept = set(wanted or ())
        rounded = _RoundedInput()

        def value_of(node: fx.Node) -> Any:
            if node in seen:
                return seen[node]
            return values[node] if node in values else self.value(node, batch)

        for node in nodes:
            seen = (within or {}).get(node, {})
            if node not in given:
                args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
                if dense and node in dense:
                    args = rounded.of(node, (args[0], dense[node], None, None, args[4], "f32", *args[6:]))
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

    def _is_given(self, node: fx.Node, place: int) -> bool:
        """Take in an input, a weight, or a node that depends on neither tokens nor positions; False for all others."""
        if node.op == "get_attr" or node in self._constants:
            return True
        if node.op == "placeholder":
            for batch, lengths in enumerate(self.batches):
                self._values.put(node, batch, lengths.input(str(node.target)), place, self._next_use)
            return True
        if all(n in self._constants or n.op == "get_attr" for n in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value(n, 0))
            self._constants[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return True
        return False

    def _compute(self, nodes: Sequence[fx.Node], place: int) -> None:
        """Compute nodes (in graph order) for every batch; what is used at `place` or later is kept, the rest dropped."""
        before = place - 1
        wanted = [node for node in nodes if self._next_use(node, before) < _NEVER]
        weights: dict[fx.Node, Any] = {}
        dense: dict[fx.Node, Tensor] = {}
        for node in nodes:
            sources = [n for n in node.all_input_nodes if n.op == "get_attr"]
            weights.update({n: executed(self.program.weight_of(n)) for n in sources if n not in weights})
            if is_call(node, OPS["quantised_linear"]):
                dense[node] = _dequantised(node, weights)
        inside = set(nodes)
        spent = {
            n for node in nodes for n in node.all_input_nodes if n not in inside and n in self._values.held
        }
        spent = {n for n in spent if self._next_use(n, before) == _NEVER}
        for batch in range(len(self.batches)):
            with bfloat16_factors() if self._quick else nullcontext():
                found = self.evaluate_with(nodes, batch, weights, wanted, dense=dense)
            for node in spent:
                self._values.drop(node, batch)
            for node in wanted:
                self._values.put(node, batch, found[node], before, self._next_use)
        self._values.release(before, self._next_use)

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


class _RoundedInput:
    """The last input that was rounded, for the linears of one input that follow one another."""

    def __init__(self) -> None:
        self._key: object = None
        self._value: Tensor | None = None

    def of(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a quantised linear with its input rounded already; as they are where columns stay apart."""
        if argument(node, "outlier_columns") is not None:
            return args
        names = ("x", "activation_format", "activation_scale")
        key = tuple(argument(node, name) for name in names)
        if key != self._key:
            self._key, self._value = key, simulate_activation(args[0], *key[1:])
        return (self._value, *args[1:6], "f32")


def _dequantised(node: fx.Node, weights: Mapping[fx.Node, Any]) -> Tensor:
    """The matrix of a quantised linear, float32."""
    names = ("codes", "scales", "offsets", "weight_format")
    parts = [argument(node, name) for name in names]
    return dequantise(*(weights[part] if isinstance(part, fx.Node) else part for part in parts))


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
        self._freed = 0
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

    def drop(self, node: fx.Node, batch: int) -> None:
        """Forget one batch's value."""
        value = self.held[node][batch]
        self.held[node][batch] = None
        if isinstance(value, Path):
            value.unlink()
        elif value is not None:
            self.bytes -= _size(value)
            self._freed += _size(value)

    def release(self, place: int, next_use: Callable[[fx.Node, int], int]) -> None:
        """Drop what no later node uses."""
        for node in [node for node in self.held if next_use(node, place) == _NEVER]:
            for batch in range(self.count):
                self.drop(node, batch)
            del self.held[node]
        if self._freed > TRIM_BYTES:
            self._freed = 0
            return_freed_memory()

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
                save_aside(value if not isinstance(value, Tensor) else value.clone(), path)
                self.held[node][batch] = path
                self.bytes -= _size(value)
                self.spilled_bytes += _size(value)

    def close(self) -> None:
        self.held.clear()
        self.bytes = 0
        return_freed_memory()
        if self._folder is not None:
            self._folder.cleanup()


def save_aside(value: Any, path: Path) -> None:
    """`torch.save` into a temporary folder. Raises InputError where the disk does not take it."""
    try:
        torch.save(value, path)
    except (OSError, RuntimeError) as error:  # torch's writer tells of a full disk in the latter
        raise no_room(path.parent, error) from error


def no_room(folder: Path, error: Exception) -> InputError:
    """What to say where temporary files of a calibration cannot be written."""
    free = shutil.disk_usage(folder).free
    return InputError(
        f"the temporary files of calibration cannot be written to {folder.parent}",
        found=f"{free / 2**20:,.0f} MiB free; {' '.join(str(error).split())[:120]}",
        action="free some space there, or name another place in the environment variable TMPDIR",
    )


def return_freed_memory() -> None:
    """Have the C library give the system what was freed; without it glibc keeps whatever lies between values still held.

    Over a whole walk that comes to more than the values themselves. Does nothing where the library has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _size(value: Any) -> int:
    """Bytes that a value keeps alive: views count as what they are views of, once a value."""
    if isinstance(value, (list, tuple)):
        return sum(_size(item) for item in value)
    return int(value.nbytes) if isinstance(value, Tensor) else 0
