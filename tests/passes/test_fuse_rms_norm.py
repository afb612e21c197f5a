import pytest

from enginewright.passes.fuse_rms_norm import FuseRmsNorm
from tests.passes.graphs import Build, after, aten, count


def mean_square(build, x, square):
    if square == "pow":
        squares = build.call(aten.pow.Tensor_Scalar, x, 2)
    else:
        squares = build.call(aten.mul.Tensor, x, x)
    return build.call(aten.mean.dim, squares, [-1], True)


def normed(build, x, square="pow", inverse="rsqrt", eps=1e-5):
    total = build.call(aten.add.Tensor, mean_square(build, x, square), eps)
    if inverse == "div":
        return build.call(aten.div.Tensor, x, build.call(aten.sqrt.default, total))
    if inverse == "rsqrt":
        return build.call(aten.mul.Tensor, x, build.call(aten.rsqrt.default, total))
    return build.call(aten.mul.Tensor, build.call(aten.pow.Tensor_Scalar, total, -0.5), x)


def norm_node(program):
    return next(node for node in program.graph.nodes if "rms_norm" in str(node.target))


@pytest.mark.parametrize("square", ["pow", "mul"])
@pytest.mark.parametrize("inverse", ["rsqrt", "pow", "div"])
def test_every_spelling_with_a_weight(square, inverse):
    build = Build()
    y = normed(build, build.hidden(6), square, inverse)
    before = build.finish(build.call(aten.mul.Tensor, build.weight("norm.weight", 6), y))
    program, result = after(FuseRmsNorm(), before)
    assert result.matches == count(program, "rms_norm") == 1
    assert count(program, aten.mul.Tensor) == 0
    assert norm_node(program).args[2:] == (1e-5, 0.0)


def test_one_plus_weight():
    build = Build()
    y = normed(build, build.hidden(6))
    factor = build.call(aten.add.Tensor, build.weight("norm.weight", 6), 1.0)
    program, result = after(FuseRmsNorm(), build.finish(build.call(aten.mul.Tensor, y, factor)))
    assert result.matches == 1
    assert norm_node(program).args[2:] == (1e-5, 1.0)


def test_no_weight_and_the_library_op():
    build = Build()
    x = build.hidden(6)
    library = build.call(aten.rms_norm.default, x, [6], build.weight("norm.weight", 6), 1e-6)
    program, result = after(FuseRmsNorm(), build.finish(normed(build, x), library))
    assert result.matches == count(program, "rms_norm") == 2


def test_norm_of_every_head_and_a_weight_a_head():
    build = Build()
    heads = build.view(build.linear(build.hidden(6), 12, "q"), 3, 4)
    shared = build.call(aten.mul.Tensor, normed(build, heads), build.weight("shared", 4))
    single = build.call(aten.mul.Tensor, normed(build, heads), build.weight("single", 3, 4))
    program, result = after(FuseRmsNorm(), build.finish(shared, single))
    assert result.matches == 2
    assert [n.args[1] is None for n in program.graph.nodes if "rms_norm" in str(n.target)] == [False, True]
    assert count(program, aten.mul.Tensor) == 1, "the weight of another shape stays a product"


def test_a_mean_over_heads_is_no_norm():
    build = Build()
    heads = build.view(build.linear(build.hidden(6), 12, "q"), 3, 4)
    squares = build.call(aten.pow.Tensor_Scalar, heads, 2)
    total = build.call(aten.add.Tensor, build.call(aten.mean.dim, squares, [1], True), 1e-5)
    before = build.finish(build.call(aten.mul.Tensor, heads, build.call(aten.rsqrt.default, total)))
    program, result = after(FuseRmsNorm(), before)
    assert result.matches == count(program, "rms_norm") == 0
