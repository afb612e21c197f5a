"""distil — what a model's middle says, put into the words of its end: a small map before a draft's last norm.

The sum that layer N hands on is not the one that the last norm and the head were trained to read. An affine map of it,

    state' = state + M · state + m        M [D, D], m [D]

brings it nearer (the "tuned lens": Belrose et al., "Eliciting latent predictions from transformers with the tuned lens",
2023, §3). It is found on states that the engine itself computes from text that the model writes:

1. least squares: the map from the state after N layers to the one after all, by the normal equations with a small ridge;
2. then Adam on the KL divergence of the draft's next token from the model's, through the model's own norm and head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from enginewright.passes.cut_draft import DraftHead, boundaries, chosen_rows, sum_of
from enginewright.passes.dialect import OPS
from enginewright.passes.dialect.numerics import dequantise
from enginewright.passes.dialect.registry import REFERENCES
from enginewright.passes.manager import remove_dead_code
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Program, executed
from enginewright.recipes.errors import LoweringError

__all__ = ["Agreement", "LogitsOf", "agreement", "fit", "logits_of_states", "states_program", "tune"]

RIDGE = 1e-4  # of the mean square of a feature
RATE = 2e-3  # Adam's first step size; it falls to nothing in a straight line
BATCH = 192  # tokens a step

LogitsOf = Callable[[Tensor], Tensor]
"""From states [T, D], what the last norm reads, to logits [T, vocab]."""


@dataclass(frozen=True)
class Agreement:
    """How near a draft is to its model: `top1`, the share of tokens with the same best next one; `kl`, mean, in nats."""

    top1: float
    kl: float


def states_program(program: Program, layers: int) -> tuple[Program, int]:
    """A Program whose "logits" begin with the state after `layers` layers and the model's last one, and 2 D, their width.

    As an engine accepts the tokens that it has logits for, zeros follow up to the vocabulary's size.
    """
    probe = program.clone()
    output = probe.graph.output_node()
    logits = output.args[0]
    assert isinstance(logits, fx.Node)
    rows = logits.meta["val"].shape[0]
    sums = [sum_of(probe, boundary) for boundary in boundaries(probe.graph, layers)]
    states = [chosen_rows(probe, state, rows, before=output) for state in sums]
    both = probe.call(torch.ops.aten.cat.default, (states, -1), before=output)
    width: int = both.meta["val"].shape[-1]
    missing = probe.facts.vocab_size - width
    if missing > 0:
        both = probe.call(torch.ops.aten.constant_pad_nd.default, (both, [0, missing]), before=output)
    else:
        probe.facts.vocab_size -= missing
    output.args = (both,)
    remove_dead_code(probe)
    probe.recompile()
    return probe, width


def logits_of_states(program: Program, layers: int) -> LogitsOf:
    """The model's last norm and head as a function that can be differentiated. Matrices are expanded once; activations are
    not rounded."""
    _, last = boundaries(program.graph, layers)
    tail: list[fx.Node] = []
    for node in program.graph.nodes:
        if node is last or any(source in tail for source in node.all_input_nodes):
            tail.append(node)
    dense: dict[fx.Node, Tensor] = {}
    known: dict[fx.Node, Any] = {}
    for node in tail:
        vectors = [argument(node, "bias")] if _is_matrix(node) else node.all_input_nodes
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                if source in vectors:
                    known[source] = executed(program.weight_of(source))
            elif source not in tail and node is not last:
                raise LoweringError(
                    "no draft head can be distilled for this model: its head reads more than the last layer's sum",
                    found=source.format_node() or source.name,
                    action="set draft.head=shared",
                )
        if _is_matrix(node):
            dense[node] = _dense(program, node)

    def logits(states: Tensor) -> Tensor:
        values: dict[fx.Node, Any] = dict(known)
        for node in tail:
            if node.op == "output":
                result: Tensor = values[node.args[0]]  # type: ignore[index]
                return result
            values[node] = _evaluate(node, values, dense, states if node is last else None)
        raise AssertionError("a graph without an output")

    return logits


def _is_matrix(node: fx.Node) -> bool:
    return is_call(node, OPS["linear"], OPS["quantised_linear"])


def _dense(program: Program, node: fx.Node) -> Tensor:
    """A linear's matrix [N, K], float32."""

    def load(name: str) -> Tensor | None:
        part = argument(node, name)
        return None if part is None else program.weight_of(part).load()

    if is_call(node, OPS["linear"]):
        return executed(program.weight_of(argument(node, "weight")))
    codes, scales, offsets = load("codes"), load("scales"), load("offsets")
    assert codes is not None
    matrix = dequantise(codes, scales, offsets, argument(node, "weight_format"))
    columns, apart = load("outlier_columns"), load("outlier_weight")
    if columns is not None and apart is not None:
        matrix[:, columns.long()] = apart.float()
    return matrix


def _evaluate(
    node: fx.Node, values: Mapping[fx.Node, Any], dense: Mapping[fx.Node, Tensor], states: Tensor | None
) -> Any:
    """A node of the tail; with `states`, the model's boundary, whose sum they are."""
    if node in dense:
        bias = argument(node, "bias")
        return torch.nn.functional.linear(
            values[argument(node, "x")], dense[node], None if bias is None else values[bias]
        )
    given = dict(values)
    if states is not None:
        x, residual = (term for term in node.args[:2] if isinstance(term, fx.Node))
        given |= {x: states, residual: torch.zeros_like(states)}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given[n])
    schema = getattr(node.target, "_schema", None)
    name = schema.name.removeprefix("ew::") if schema is not None else ""
    target = REFERENCES.get(name, node.target)
    return target(*args, **kwargs)  # type: ignore[operator]


# The map.


def fit(early: Tensor, late: Tensor) -> DraftHead:
    """The least-squares map from `early` to `late`, both [T, D]."""
    width = early.shape[1]
    x, y = early.double(), late.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    matrix = torch.linalg.solve(gram, x.T @ y).T  # late = matrix · early
    bias = y_mean - matrix @ x_mean
    return DraftHead((matrix - torch.eye(width, dtype=torch.float64)).float(), bias.float())


def tune(
    head: DraftHead,
    early: Tensor,
    late: Tensor,
    logits_of: LogitsOf,
    steps: int,
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> DraftHead:
    """Adam on the KL divergence from the model's next-token distribution, `steps` steps of BATCH tokens each."""
    matrix, bias = (part.clone().requires_grad_() for part in (head.matrix, head.bias))
    optimiser = torch.optim.Adam([matrix, bias], lr=RATE)
    chance = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        chosen = torch.randint(len(early), (BATCH,), generator=chance)
        with torch.no_grad():
            wanted = logits_of(late[chosen].float()).log_softmax(-1)
        with torch.enable_grad():
            mapped = DraftHead(matrix, bias).apply(early[chosen].float())
            loss = _divergence(wanted, logits_of(mapped))
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        if step % 10 == 9:
            report(f"draft head: {step + 1} of {steps} steps, KL {loss.item():.3f}")
    return DraftHead(matrix.detach(), bias.detach())


def agreement(head: DraftHead | None, early: Tensor, late: Tensor, logits_of: LogitsOf) -> Agreement:
    """How near the draft with this head (None: the model's own alone) comes to the model on these states."""
    same, nats = 0, 0.0
    with torch.no_grad():
        for x, y in zip(early.split(BATCH), late.split(BATCH), strict=True):
            wanted = logits_of(y.float())
            found = logits_of(x.float() if head is None else head.apply(x.float()))
            same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
            nats += float(_divergence(wanted.log_softmax(-1), found)) * len(x)
    return Agreement(same / len(early), nats / len(early))


def _divergence(wanted: Tensor, logits: Tensor) -> Tensor:
    """Mean KL divergence of softmax(logits) from the log-probabilities `wanted`, nats."""
    return torch.nn.functional.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
