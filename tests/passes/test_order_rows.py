import torch

from enginewright.passes.order_rows import OrderRows
from tests.passes.graphs import Build, after, aten, count

HEADS, WIDTH = 3, 4


def attention(build, q, k, v):
    return build.call("attention", q, k, v, None, None, 0.5, 0, 0.0, 0)


def packed(build, table="embed.weight"):
    return build.linear(build.hidden(6, table), HEADS * 3 * WIDTH, "qkv", bias=True)


def test_heads_that_hold_query_key_and_value():
    build = Build()
    heads = build.view(packed(build), HEADS, 3 * WIDTH)
    parts = [build.call(aten.slice.Tensor, heads, 2, i * WIDTH, (i + 1) * WIDTH) for i in range(3)]
    before = build.finish(attention(build, *parts))
    program, result = after(OrderRows(), before)
    assert result.matches == 1
    slices = [n for n in program.graph.nodes if n.target is aten.slice.Tensor]
    assert [n.args[1:] for n in slices] == [(-1, 0, 12), (-1, 12, 24), (-1, 24, 36)]
    whole = before.weights["qkv.weight"].load().reshape(HEADS, 3, WIDTH, 6).transpose(0, 1)
    assert torch.equal(program.weights["qkv.weight.ordered"].load(), whole.reshape(-1, 6))


def test_selections_and_permutations():
    build = Build()
    heads = build.view(packed(build), HEADS, 3, WIDTH)
    parts = [build.call(aten.select.int, heads, 2, i) for i in range(3)]
    program, result = after(OrderRows(), build.finish(attention(build, *parts)))
    assert result.matches == 1
    assert count(program, aten.select.int) == 0


def test_contiguous_parts_and_read_rows_stay():
    build = Build()
    plain = build.linear(build.hidden(6), 24, "plain")
    ranges = [build.view(build.call(aten.slice.Tensor, plain, -1, 8 * i, 8 * i + 8), 2, 4) for i in range(3)]
    twice = build.view(packed(build, "other"), HEADS, 3, WIDTH)
    parts = [build.call(aten.select.int, twice, 2, i) for i in (0, 1, 1)]
    before = build.finish(attention(build, *ranges), attention(build, *parts), twice)
    program, result = after(OrderRows(), before)
    assert result.matches == 0
    assert not any(name.endswith("ordered") for name in program.weights)
