from enginewright.passes.fuse_bias import FuseBias
from tests.passes.graphs import Build, after, aten, count


def test_a_bias_added_afterwards():
    build = Build()
    total = build.call(aten.add.Tensor, build.weight("fc.bias", 5), build.linear(build.hidden(6), 5, "fc"))
    program, result = after(FuseBias(), build.finish(total))
    assert result.matches == count(program, "linear") == 1
    assert count(program, aten.add.Tensor) == 0


def test_other_sums_stay():
    build = Build()
    x = build.hidden(6)
    shared = build.linear(x, 6, "shared")
    sums = [
        build.call(aten.add.Tensor, shared, build.weight("bias", 6)),
        build.call(aten.add.Tensor, build.linear(x, 6, "a"), x),
        build.call(aten.add.Tensor, build.linear(x, 6, "b"), build.weight("one", 1)),
        build.call(aten.add.Tensor, build.linear(x, 6, "c", bias=True), build.weight("more", 6)),
    ]
    program, result = after(FuseBias(), build.finish(shared, *sums))
    assert result.matches == 0
    assert count(program, aten.add.Tensor) == 4
