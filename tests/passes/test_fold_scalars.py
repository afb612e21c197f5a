import torch

from enginewright.passes.fold_scalars import FoldScalars
from tests.passes.graphs import Build, after, aten, count


def test_identities_vanish():
    build = Build()
    x = build.linear(build.hidden(6), 5, "fc")
    x = build.call(aten.mul.Tensor, x, 1.0)
    x = build.call(aten.div.Tensor, x, 1)
    x = build.call(aten.add.Tensor, x, build.weight("zero", value=torch.zeros(())))
    program, result = after(FoldScalars(), build.finish(x), tolerance=0)
    assert result.matches == 3
    assert count(program, aten.mul.Tensor) == count(program, aten.div.Tensor) == 0


def test_a_scaled_embedding():
    build = Build()
    scaled = build.call(aten.mul.Tensor, build.hidden(6), build.weight("scale", value=torch.tensor(2.45)))
    program, result = after(FoldScalars(), build.finish(scaled), tolerance=0)
    assert result.matches == 1
    assert count(program, aten.mul.Tensor) == 0


def test_powers_of_two_go_into_the_attention():
    build = Build()
    q, k, v = (build.view(build.linear(build.hidden(6, f"e{n}"), 8, n), 2, 4) for n in "qkv")
    q, k = build.call(aten.mul.Tensor, q, 0.5), build.call(aten.mul.Tensor, k, 0.3)
    before = build.finish(build.call("attention", q, k, v, None, None, 0.7, 0, 0.0, 0))
    program, result = after(FoldScalars(), before, tolerance=0)
    assert result.matches == 1
    assert count(program, aten.mul.Tensor) == 1, "0.3 would round elsewhere"


def test_other_factors_stay():
    build = Build()
    rows = build.hidden(6)
    x = build.call(aten.mul.Tensor, build.linear(rows, 5, "fc"), 3.0)
    program, result = after(FoldScalars(), build.finish(x, build.call(aten.mul.Tensor, rows, 2.0), rows))
    assert result.matches == 0
    assert count(program, aten.mul.Tensor) == 2
