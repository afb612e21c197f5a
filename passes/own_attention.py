"""Attention that a model computes by itself, recognised in the captured graph by evaluating it.

Rules:
1. A softmax over keys, of a tensor [..., T, T], is the middle of an attention; so is
   `scaled_dot_product_attention`. Behind it stands a product with the values, before it a product of queries
   and keys, and between them only positions may enter.
2. What happens between the product and the softmax is taken as a function of the score and evaluated at a few
   scores: it must be scale · score + bias, or hide the key. The hidden keys must be those of a causal mask or
   a window. The bias must be, up to a constant a row, slope[head] · (key position - query position): ALiBi.
   Names and configurations are not consulted.
3. Key/value heads that repeat (g neighbours equal for any input) are cached once.
4. The rewritten attention must give the same numbers as the traced one on random queries, keys and values.

Source: ALiBi: Press et al. 2022, §3.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import torch
from torch import fx

from enginewright.passes.capture_hooks import OWN_LENGTH, classify_mask
from enginewright.passes.positional import Positional
from enginewright.passes.program import Program
from enginewright.passes.weights import ConstantTensor
from enginewright.recipes.errors import CaptureError

__all__ = ["recognise_attention"]

aten, ew = torch.ops.aten, torch.ops.ew

_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_PASSING = {
    aten.to.dtype, aten._to_copy.default, aten.dropout.default, aten.view.default, aten.reshape.default,
    aten.clone.default, aten.expand.default, aten.contiguous.default, aten.alias.default,
    aten.type_as.default, aten.unsqueeze.default, aten.squeeze.dim, aten.flatten.using_ints,
    aten.unflatten.int,
}  # fmt: skip


@dataclasses.dataclass
class _Found:
    """One attention: captured nodes of the queries, keys and values [(1,) heads, T, D], the result, and its terms."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    keys_last: bool  # `k` is [..., D, T]
    out: fx.Node
    scale: float
    window: int
    slopes: torch.Tensor | None


def recognise_attention(program: Program) -> int:
    """Replace every own attention by `ew.attention` nodes, in place; returns how many there were."""
    square = [n for n in program.graph.nodes if n.op == "call_function" and _is_square(n)]
    softmaxes = [n for n in square if n.target in _SOFTMAX]
    fused = [n for n in program.graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    if not softmaxes and not fused:
        return 0
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    layer = sum(n.target is ew.attention.default for n in program.graph.nodes)
    for node in sorted(softmaxes + fused, key=order.__getitem__):
        positional = Positional(program)
        found = _from_softmax(positional, node) if node in softmaxes else _from_fused(positional, node)
        _replace(program, found, layer)
        layer += 1
    program.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    program.recompile()
    return layer


def _is_square(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    return all(isinstance(size, torch.SymInt) for size in value.shape[-2:])


def _fail(node: fx.Node, reason: str, found: object = None) -> CaptureError:
    return CaptureError(
        f"the attention in {node.meta.get('module') or 'the model'} is not understood: {reason}",
        found=node.name if found is None else found,
    )


def _from_softmax(positional: Positional, softmax: fx.Node) -> _Found:
    rank = softmax.meta["val"].dim()
    if cast(int, softmax.args[1]) % rank != rank - 1:
        raise _fail(softmax, "its softmax does not run over keys")
    logits: Any = softmax.args[0]
    scores = _scores(positional, logits)
    queries, keys = cast("tuple[fx.Node, fx.Node]", scores.args[:2])
    out, values = _values(softmax)
    scale, window, slopes = _terms(positional, scores, logits, softmax)
    return _Found(queries, keys, values, True, out, scale, window, slopes)


def _scores(positional: Positional, node: fx.Node) -> fx.Node:
    """Back from the softmax to the product of queries and keys."""
    while node.target not in _PRODUCTS:
        carrying = [n for n in node.all_input_nodes if n not in positional]
        if node.op != "call_function" or len(carrying) != 1:
            raise _fail(node, "something besides positions meets the scores")
        node = carrying[0]
    return node


def _values(softmax: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Forward from the softmax to (the product with the values, the values)."""
    node = softmax
    while True:
        users = list(node.users)
        if len(users) != 1:
            raise _fail(softmax, "its weights are used more than once")
        user = users[0]
        if user.target in _PRODUCTS and user.args[0] is node:
            return user, cast(fx.Node, user.args[1])
        if user.target not in _PASSING:
            raise _fail(softmax, f"its weights go through {user.target}")
        node = user


def _from_fused(positional: Positional, node: fx.Node) -> _Found:
    q, k, v = cast("tuple[fx.Node, fx.Node, fx.Node]", node.args[:3])
    mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    scale: Any = node.kwargs.get("scale") or q.meta["val"].shape[-1] ** -0.5
    if mask is None:
        if not causal:
            raise _fail(node, "it is not causal")
        return _Found(q, k, v, False, node, float(scale), 0, None)
    if mask not in positional:
        raise _fail(node, "its mask depends on more than positions")
    tokens = min(OWN_LENGTH, positional.program.facts.max_context)
    bias = positional.evaluate(mask, tokens)
    if bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape).masked_fill(~bias, float("-inf"))
    heads = q.meta["val"].shape[1]
    window, slopes = _classify(bias.reshape(-1, tokens, tokens), heads, node, positional)
    return _Found(q, k, v, False, node, float(scale), window, slopes)


def _terms(
    positional: Positional, scores: fx.Node, logits: fx.Node, softmax: fx.Node
) -> tuple[float, int, torch.Tensor | None]:
    """(scale, window, slopes) of the steps from the raw scores to the softmax's input, by rule 2."""
    tokens = min(OWN_LENGTH, positional.program.facts.max_context)
    shape = [tokens if isinstance(size, torch.SymInt) else size for size in scores.meta["val"].shape]

    def at(score: float) -> torch.Tensor:
        given = {scores: torch.full(shape, score)}
        return positional.evaluate_all([logits], tokens, given)[0].reshape(-1, tokens, tokens)

    zero, one, other = at(0.0), at(1.0), at(-2.5)
    visible = zero > torch.finfo(torch.float32).min / 4
    steps = (one - zero)[visible]
    scale = float(steps.median())
    line = zero - 2.5 * scale
    if (
        scale <= 0
        or not torch.equal(visible, one > torch.finfo(torch.float32).min / 4)
        or not torch.allclose(steps, torch.full_like(steps, scale), rtol=1e-3, atol=1e-5)
        or not torch.allclose(other[visible], line[visible], rtol=1e-4, atol=1e-4)
    ):
        raise _fail(softmax, "the scores are not scaled by one number")
    # The difference of two rounded numbers carries their noise; without a bias the scale itself can be read off.
    plain = at(1.0)[visible & (zero == 0)]
    if plain.numel():
        scale = float(plain.median())
    heads = zero.shape[0]
    window, slopes = _classify(zero, heads, softmax, positional)
    return scale, window, slopes


def _classify(
    bias: torch.Tensor, heads: int, node: fx.Node, positional: Positional
) -> tuple[int, torch.Tensor | None]:
    """The window and the ALiBi slopes of a bias [heads or 1, T, T], whose hidden keys are hugely negative."""
    tokens = bias.shape[-1]
    visible = bias > torch.finfo(torch.float32).min / 4
    if not torch.equal(visible, visible[:1].expand_as(visible)):
        raise _fail(node, "its heads see different keys")
    window = classify_mask(lambda rows, columns: visible[0][rows, columns], tokens).window
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    relative = bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
    relative = torch.where(visible, relative, 0.0)
    if not relative.any():
        return window, None
    last = min(tokens, window or tokens) - 1
    noise = float(torch.where(visible, bias, 0.0).abs().max())
    worst, slopes = float("inf"), relative[:, 0, 0]
    for far in (1, last):  # from neighbours, and from the ends: whichever the rounding of the biases spares
        candidate = relative[:, last, last - far] / -far
        expected = torch.where(visible, candidate[:, None, None] * distance, 0.0)
        error = float((relative - expected).abs().max())
        if error < worst:
            worst, slopes = error, candidate
    if worst > noise * 2**-8:
        raise _fail(node, "its bias is not linear in the distance", f"off by {worst:.3g} of {noise:.3g}")
    if worst > noise * 1e-5:
        positional.program.notes.append(
            f"ALiBi in {node.meta.get('module')}: the source rounds its biases, by up to {worst:.2g}; "
            "the engine does not"
        )
    return window, slopes.expand(heads).contiguous()


def _replace(program: Program, found: _Found, layer: int) -> None:
    module = found.out.meta.get("module", "")
    q = _packed(program, found.q, found.out, False, module)
    k = _packed(program, found.k, found.out, found.keys_last, module)
    v = _packed(program, found.v, found.out, False, module)
    now = Positional(program)
    repeats = math.gcd(_repeats(now, k), _repeats(now, v))
    if repeats > 1:
        k = program.call(aten.slice.Tensor, (k, 1, 0, 2**62, repeats), before=found.out, module=module)
        v = program.call(aten.slice.Tensor, (v, 1, 0, 2**62, repeats), before=found.out, module=module)
    alibi = None
    if found.slopes is not None:
        name = f"constants.alibi_slopes_{layer}"
        known = next(
            (n for n, w in program.weights.items()
             if n.startswith("constants.alibi_slopes") and torch.equal(w.load(), found.slopes)), None,
        )  # fmt: skip
        alibi = (
            program.weight_node(known)
            if known
            else program.add_weight(name, ConstantTensor(name, found.slopes))
        )
    terms = (float(found.scale), found.window, 0.0, layer)
    made = program.call(ew.attention.default, (q, k, v, None, alibi, *terms), before=found.out, module=module)
    _prove(Positional(program), found, q, k, v, made)
    result = program.call(aten.transpose.int, (made, 0, 1), before=found.out, module=module)
    if found.out.meta["val"].dim() == 4:
        result = program.call(aten.unsqueeze.default, (result, 0), before=found.out, module=module)
    found.out.replace_all_uses_with(result)


def _packed(program: Program, node: fx.Node, before: fx.Node, keys_last: bool, module: str) -> fx.Node:
    """[(1,) heads, T, D], or with `keys_last` [(1,) heads, D, T], as [T, heads, D]."""
    if node.meta["val"].dim() == 4:
        node = program.call(aten.select.int, (node, 0, 0), before=before, module=module)
    order = [2, 0, 1] if keys_last else [1, 0, 2]
    return program.call(aten.permute.default, (node, order), before=before, module=module)


def _repeats(positional: Positional, packed: fx.Node) -> int:
    """How many neighbouring heads of [T, heads, D] are equal whatever the projections give (rule 3)."""
    tokens = 3
    given: dict[fx.Node, torch.Tensor] = {}
    stack, seen = [packed], set()
    generator = torch.Generator().manual_seed(0)
    while stack:
        node = stack.pop()
        if node in seen or node in positional:
            continue
        seen.add(node)
        if node.target in (aten.linear.default, aten.addmm.default, *_PRODUCTS) or node.op != "call_function":
            shape = [tokens if isinstance(size, torch.SymInt) else size for size in node.meta["val"].shape]
            given[node] = torch.randn(shape, generator=generator)
            continue
        stack += node.all_input_nodes
    value = positional.evaluate_all([packed], tokens, given)[0]
    heads = value.shape[1]
    for repeats in sorted((r for r in range(1, heads + 1) if heads % r == 0), reverse=True):
        groups = value.unflatten(1, (-1, repeats))
        if torch.equal(groups, groups[:, :, :1].expand_as(groups)):
            return repeats
    return 1


def _prove(positional: Positional, found: _Found, q: fx.Node, k: fx.Node, v: fx.Node, made: fx.Node) -> None:
    """Rule 4, on a short text."""
    tokens = min(21, positional.program.facts.max_context)
    generator = torch.Generator().manual_seed(1)
    given: dict[fx.Node, torch.Tensor] = {}
    repeats = found.k.meta["val"].shape[-3] // k.meta["val"].shape[1]
    for node in (found.q, found.k, found.v):
        shape = [tokens if isinstance(size, torch.SymInt) else size for size in node.meta["val"].shape]
        if node is not found.q and repeats > 1:
            shape[-3] //= repeats
        value = torch.randn(shape, generator=generator)
        if node is not found.q and repeats > 1:
            value = value.repeat_interleave(repeats, -3)
        given[node] = value
    expected = positional.evaluate_all([found.out], tokens, dict(given))[0]
    got = positional.evaluate_all([made], tokens, dict(given))[0].transpose(0, 1).reshape(expected.shape)
    error = float((got - expected).abs().max())
    if not error < 2e-2 * float(expected.abs().max()):
        raise _fail(found.out, "the recognised form gives other numbers", f"an error of {error:.2g}")
