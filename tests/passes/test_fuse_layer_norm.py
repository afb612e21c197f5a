from enginewright.passes.fuse_layer_norm import FuseLayerNorm
from tests.passes.graphs import Build, after, aten, count


def centred(build, x, axis=-1):
    return build.call(aten.sub.Tensor, x, build.call(aten.mean.dim, x, [axis], True))


def divided(build, c, axis=-1):
    variance = build.call(aten.mean.dim, build.call(aten.pow.Tensor_Scalar, c, 2), [axis], True)
    total = build.call(aten.add.Tensor, variance, 1e-5)
    return build.call(aten.mul.Tensor, c, build.call(aten.rsqrt.default, total))


def test_the_library_op():
    build = Build()
    args = (build.hidden(6), [6], build.weight("norm.weight", 6), build.weight("norm.bias", 6), 1e-3)
    program, result = after(FuseLayerNorm(), build.finish(build.call(aten.layer_norm.default, *args)))
    assert result.matches == count(program, "layer_norm") == 1


def test_written_out_with_and_without_weight():
    build = Build()
    x = build.hidden(6)
    weighted = build.call(aten.mul.Tensor, build.weight("norm.weight", 6), divided(build, centred(build, x)))
    plain = divided(build, centred(build, x))
    program, result = after(FuseLayerNorm(), build.finish(weighted, plain))
    assert result.matches == count(program, "layer_norm") == 2
    assert count(program, aten.mul.Tensor) == 0


def test_mean_of_squares_without_centring_stays():
    build = Build()
    x = build.hidden(6)
    heads = build.view(x, 2, 3)
    before = build.finish(divided(build, x), divided(build, centred(build, heads, 1), 1))
    program, result = after(FuseLayerNorm(), before)
    assert result.matches == count(program, "layer_norm") == 0
