import torch

from enginewright.passes.program import Stage
from enginewright.passes.slice_before_rope import SliceBeforeRope
from tests.passes.graphs import Build, after, aten


def rotated(build):
    x = build.view(build.linear(build.hidden(6), 24, "k"), 6, 4)
    table = build.table("cos", torch.linspace(-1, 1, 64).view(32, 2))
    return build.call("rope", x, table, table, 4, False)


def ropes(program):
    return [list(n.meta["val"].shape[1:]) for n in program.graph.nodes if "rope" in str(n.target)]


def test_every_third_head():
    build = Build(Stage.FUSED)
    before = build.finish(build.call(aten.slice.Tensor, rotated(build), 1, 0, 6, 3))
    program, result = after(SliceBeforeRope(), before, tolerance=0)
    assert result.matches == 1
    assert ropes(program) == [[2, 4]]


def test_slices_of_features_and_shared_ropes_stay():
    build = Build(Stage.FUSED)
    whole = rotated(build)
    parts = [build.call(aten.slice.Tensor, whole, 1, 0, 3), build.call(aten.slice.Tensor, whole, 2, 0, 2)]
    program, result = after(SliceBeforeRope(), build.finish(*parts))
    assert result.matches == 0
    assert ropes(program) == [[6, 4]]
