from enginewright.passes.merge_duplicates import MergeDuplicates
from enginewright.passes.program import Stage
from tests.passes.graphs import Build, after, aten, count


def test_chains_of_equal_nodes_merge():
    build = Build()
    x = build.hidden(6)
    twice = [build.call(aten.sub.Tensor, x, build.call(aten.mean.dim, x, [-1], True)) for _ in range(2)]
    before = build.finish(build.call(aten.mul.Tensor, *twice))
    program, result = after(MergeDuplicates(), before, Stage.NORMALISED, tolerance=0)
    assert result.matches == 2
    assert count(program, aten.sub.Tensor) == count(program, aten.mean.dim) == 1


def test_unlike_arguments_stay():
    build = Build()
    x = build.hidden(6)
    parts = [build.call(aten.mul.Tensor, x, factor) for factor in (1, 1.0, 2.0)]
    program, result = after(MergeDuplicates(), build.finish(*parts), Stage.NORMALISED, tolerance=0)
    assert result.matches == 0
    assert count(program, aten.mul.Tensor) == 3
