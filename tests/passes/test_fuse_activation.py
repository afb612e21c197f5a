import math

import pytest

from enginewright.passes.fuse_activation import FuseActivation
from tests.passes.graphs import Build, after, aten, count


def mul(build, a, b):
    return build.call(aten.mul.Tensor, a, b)


def gelu_new(build, x):
    cube = mul(build, build.call(aten.pow.Tensor_Scalar, x, 3.0), 0.044715)
    inner = mul(build, build.call(aten.add.Tensor, x, cube), math.sqrt(2 / math.pi))
    gate = build.call(aten.add.Tensor, build.call(aten.tanh.default, inner), 1.0)
    return mul(build, mul(build, x, 0.5), gate)


def gelu_by_erf(build, x):
    gate = build.call(
        aten.add.Tensor, build.call(aten.erf.default, build.call(aten.div.Tensor, x, math.sqrt(2))), 1.0
    )
    return mul(build, mul(build, x, 0.5), gate)


def swish(build, x):
    return mul(build, x, build.call(aten.sigmoid.default, x))


def squared_relu(build, x):
    return build.call(aten.pow.Tensor_Scalar, build.call(aten.relu.default, x), 2)


SPELLINGS = {
    "gelu_new": (gelu_new, "gelu_tanh"),
    "gelu_by_erf": (gelu_by_erf, "gelu"),
    "swish": (swish, "silu"),
    "squared_relu": (squared_relu, "relu2"),
    "silu": (lambda b, x: b.call(aten.silu.default, x), "silu"),
    "gelu": (lambda b, x: b.call(aten.gelu.default, x), "gelu"),
    "gelu_tanh": (lambda b, x: b.call(aten.gelu.default, x, approximate="tanh"), "gelu_tanh"),
    "relu": (lambda b, x: b.call(aten.relu.default, x), "relu"),
    "tanh": (lambda b, x: b.call(aten.tanh.default, x), "tanh"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(name):
    spell, kind = SPELLINGS[name]
    build = Build()
    before = build.finish(spell(build, build.linear(build.hidden(6), 5, "fc")))
    program, result = after(FuseActivation(), before)
    assert result.matches == count(program, "activation") == 1
    assert [n.args[1] for n in program.graph.nodes if "activation" in str(n.target)] == [kind]
    assert not any(
        count(program, op) for op in (aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.sigmoid.default)
    )


def test_others_stay():
    build = Build()
    x = build.linear(build.hidden(6), 5, "fc")
    quick = mul(build, x, build.call(aten.sigmoid.default, mul(build, x, 1.702)))
    other = mul(build, x, build.call(aten.add.Tensor, build.linear(x, 5, "fc2"), 1.0))
    program, result = after(FuseActivation(), build.finish(quick, other))
    kinds = [n.args[1] for n in program.graph.nodes if "activation" in str(n.target)]
    assert kinds == ["sigmoid"], "only the sigmoid inside is known"
    assert result.matches == 1
    assert count(program, aten.mul.Tensor) == 3
