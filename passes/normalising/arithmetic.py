"""Normalisation of arithmetic: elementwise operations, products with weights, norms, reductions."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from enginewright.passes.normalising.rewriter import (
    Complex,
    Rewriter,
    Value,
    call_arguments,
    default,
    op_name,
    rule,
)
from enginewright.passes.weights import ConstantTensor, Weight, transposed

aten, ew = torch.ops.aten, torch.ops.ew


@rule("clone contiguous detach alias dropout lift_fresh_copy lift_fresh feature_dropout")
def same(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    """Copies, dropout, casts that do not matter."""
    source = next(iter(args.values()))
    return r.unchanged(source)


@rule("to _to_copy type_as float")
def cast(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    source = next(iter(args.values()))
    before, after = r.fake(source).dtype, r.fake(node).dtype
    if before == after or (before.is_floating_point and after.is_floating_point):
        return same(r, node, args)
    v = r.value(source)
    dtype = torch.float32 if after.is_floating_point else after
    return dataclasses.replace(v, node=r.emit(aten.to.dtype, v.node, dtype))


@rule("view_as_complex")
def as_complex(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Complex:
    x = r.value(args["self"])
    return Complex(r.picked(x, x.rank - 1, 0), r.picked(x, x.rank - 1, 1))


@rule("view_as_real")
def as_real(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    z = r.values[args["self"]]
    fake = r.fake(node)
    return r.joined([r.raised(part, fake.dim() - 1) for part in (z.real, z.imag)], fake.dim() - 1, fake)


def complex_product(r: Rewriter, node: fx.Node, a: Any, b: Any) -> Complex:
    """Rule 6: (a + bi)(c + di)."""
    a, b = (v if isinstance(v, Complex) else r.fail("a product of complex and real") for v in (a, b))
    layout = r.result_layout(node, [a.real, b.real])

    def times(x: Value, y: Value) -> fx.Node:
        return r.emit(aten.mul.Tensor, r.aligned(x, *layout), r.aligned(y, *layout))

    real = r.emit(aten.sub.Tensor, times(a.real, b.real), times(a.imag, b.imag))
    imag = r.emit(aten.add.Tensor, times(a.real, b.imag), times(a.imag, b.real))
    return Complex(r.wrap(real, layout), r.wrap(imag, layout))


@rule("""abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    clamp clamp_max clamp_min cos cosh div elu eq erf exp exp2 expm1 floor floor_divide fmod ge
    gelu gt hardsigmoid hardswish hardtanh isinf isnan le leaky_relu lerp log log10 log1p log2 logical_and
    logical_not logical_or logical_xor lt masked_fill maximum minimum mish mul ne neg pow
    reciprocal relu relu6 remainder round rsqrt rsub sigmoid sign silu sin sinh softplus sqrt
    square sub tan tanh trunc where log_sigmoid""")
def elementwise(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    """Rule 1 for operations that broadcast: operands are aligned, numbers stay numbers."""
    if r.fake(node).is_complex():
        if op_name(node.target) != "mul":
            r.fail("complex arithmetic other than a product")
        operands = [r.positional_value(a) if a in r.positional else r.values[a] for a in args.values()]
        return complex_product(r, node, *operands)
    values: dict[str, Any] = {}
    for key, argument in args.items():
        if isinstance(argument, fx.Node):
            found = r.positional_value(argument) if argument in r.positional else r.value(argument)
            values[key] = found
        else:
            values[key] = argument
    operands = [v for v in values.values() if isinstance(v, Value)]
    layout = r.result_layout(node, operands)
    made = {k: r.aligned(v, *layout) if isinstance(v, Value) else v for k, v in values.items()}
    numbers = [k for k, v in args.items() if isinstance(v, fx.Node) and not isinstance(values[k], Value)]
    target = node.target
    if target in (aten.max.other, aten.min.other):
        target = aten.maximum.default if target is aten.max.other else aten.minimum.default
    if numbers:
        found = _with_numbers(target, made, numbers)
        for key in numbers if found is None else ():
            constant = ConstantTensor(f"constants.{args[key].name}", torch.tensor(made[key]))
            made[key] = r.weight_node(constant)
        target, made = found or (target, made)
    positional_args, keywords = call_arguments(target, made)
    return r.wrap(r.emit(target, *positional_args, **keywords), layout)


@rule("linear")
def linear(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    x = r.value(args["input"])
    weight = r.weight(args["weight"])
    if weight is None:
        r.fail("a product of two activations")
    return product(r, x, weight, args.get("bias"))


def product(r: Rewriter, x: Value, weight: Weight, bias: Any) -> Value:
    """Rule 3: x [..., K] times weight [N, K] transposed, plus bias [N]."""
    if x.token is None or x.token == x.rank - 1:
        r.fail("a product whose input has no features")
    bias_node = r.value(bias).node if isinstance(bias, fx.Node) else None
    made = r.emit(ew.linear.default, x.node, r.weight_node(weight), bias_node)
    return dataclasses.replace(x, node=made)


@rule("matmul mm bmm")
def matmul(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    left, right = list(args.values())[:2]
    weight = r.weight(right)
    if weight is not None and len(weight.shape) == 2 and r.weight(left) is None:
        return product(r, r.value(left), transposed(weight), None)
    return inner_product(r, node, r.value(left), r.value(right))


def inner_product(r: Rewriter, node: fx.Node, a: Value, b: Value) -> Value:
    """A matrix product inside each token's row (the token axis is a batch axis of it)."""
    rank, token, batch = r.result_layout(node, [a, b])
    if token is None or token >= rank - 2:
        r.fail("a product along or across tokens outside attention")
    left, right = r.aligned(a, rank, token, batch), r.aligned(b, rank, token, batch)
    return Value(r.emit(aten.matmul.default, left, right), rank, token, batch)


@rule("addmm")
def addmm(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    weight = r.weight(args["mat2"])
    if weight is None or args.get("alpha", 1) != 1 or args.get("beta", 1) != 1:
        r.fail("a product of two activations")
    return product(r, r.value(args["mat1"]), transposed(weight), args["self"])


@rule("layer_norm")
def layer_norm(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    """Rule 7."""
    x = r.value(args["input"])
    if len(args["normalized_shape"]) != 1 or x.token == x.rank - 1:
        r.fail("a layer norm over several axes")
    weight, bias = (r.value(args[k]).node if args.get(k) is not None else None for k in ("weight", "bias"))
    return dataclasses.replace(x, node=r.emit(ew.layer_norm.default, x.node, weight, bias, args["eps"]))


@rule("rms_norm")
def rms_norm(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    x = r.value(args["input"])
    if len(args["normalized_shape"]) != 1 or x.token == x.rank - 1:
        r.fail("a norm over several axes")
    weight = r.value(args["weight"]).node if args.get("weight") is not None else None
    eps = args.get("eps")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return dataclasses.replace(x, node=r.emit(ew.rms_norm.default, x.node, weight, eps))


@rule("""softmax _softmax log_softmax _log_softmax sum mean amax amin max min prod var all any argmax argmin
    argsort sort topk cumsum cumprod logsumexp flip""")
def along(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Any:
    """Reductions, softmax, top-k and the like along feature axes."""
    x = r.value(next(iter(args.values())))
    made = dict(args)
    first = next(iter(args))
    made[first] = x.node
    kept = bool(args.get("keepdim", False))
    dims = args.get("dim", args.get("dims", default(node.target, "dim")))
    axes = dims if isinstance(dims, (list, tuple)) else [dims]
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        r.fail("a reduction over all axes")
    captured = [a % x.rank for a in axes]
    if x.token is not None and x.token in captured:
        r.fail(f"{op_name(node.target)} works along the tokens")
    key = "dims" if "dims" in args else "dim"
    mapped = [x.axis(a) for a in captured]
    made[key] = mapped if isinstance(dims, (list, tuple)) else mapped[0]
    if made.get("dtype") is not None and made["dtype"].is_floating_point:
        made["dtype"] = torch.float32
    positional_args, keywords = call_arguments(node.target, made)
    result = r.emit(node.target, *positional_args, **keywords)
    outputs = node.meta["val"]
    several = isinstance(outputs, (tuple, list))

    def place(out: fx.Node, fake: torch.Tensor) -> Value:
        if fake.dim() == x.rank or kept:
            return dataclasses.replace(x, node=out)
        left = [a for a in range(x.rank) if a not in captured]
        return Value(
            out, len(left),
            left.index(x.token) if x.token is not None else None,
            left.index(x.batch) if x.batch is not None else None,
        )  # fmt: skip

    if not several:
        return place(result, outputs)
    return [place(r.emit(operator.getitem, result, i), fake) for i, fake in enumerate(outputs)]


@rule("ew.attention ew.moe")
def packed(r: Rewriter, node: fx.Node, args: dict[str, Any]) -> Value:
    """ew.attention and ew.moe already speak [T, ...]; only their arguments need their new nodes."""
    made = {}
    for key, argument in args.items():
        if not isinstance(argument, fx.Node):
            made[key] = argument
            continue
        v = r.value(argument)
        made[key] = v.node if v.token is None else r.aligned(v, v.rank, v.token, None)
    positional_args, keywords = call_arguments(node.target, made)
    return Value(r.emit(node.target, *positional_args, **keywords), r.fake(node).dim(), 0)


def _with_numbers(target: Any, values: dict[str, Any], numbers: list[str]) -> Any:
    """(overload, arguments) of an elementwise op that takes Python numbers for these arguments, or None."""
    name, overload = op_name(target), target._overloadname
    if overload == "Tensor" and name in ("add", "mul", "sub", "div") and numbers == ["other"]:
        return target, values  # fx lets a number stand for the tensor `other`
    if overload == "Tensor" and numbers == ["self"] and name in ("add", "mul"):
        return target, {**values, "self": values["other"], "other": values["self"]}
    if overload == "Tensor" and numbers == ["self"] and name == "sub" and values.get("alpha", 1) == 1:
        return aten.rsub.Scalar, {"self": values["other"], "other": values["self"]}
    if name in ("maximum", "minimum") and numbers in (["other"], ["self"]):
        number = values[numbers[0]]
        tensor = values["self" if numbers == ["other"] else "other"]
        target = aten.clamp_min.default if name == "maximum" else aten.clamp_max.default
        return target, {"self": tensor, "min" if name == "maximum" else "max": number}
    scalar = {"Tensor": "Scalar", "Tensor_Tensor": "Tensor_Scalar", "self": "ScalarOther"}.get(overload)
    packet = getattr(aten, name)
    if scalar and scalar in packet.overloads() and numbers == ["other"]:
        return getattr(packet, scalar), values
    if name == "pow" and numbers == ["exponent"]:
        return aten.pow.Tensor_Scalar, values
    if name == "masked_fill" and numbers == ["value"]:
        return aten.masked_fill.Scalar, values
    if name == "where" and numbers == ["other"]:
        return aten.where.ScalarOther, values
    if name == "where" and numbers == ["self"]:
        return aten.where.ScalarSelf, values
    return None
