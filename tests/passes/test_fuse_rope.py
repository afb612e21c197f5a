import pytest
import torch
from torch import fx

from enginewright.passes.fuse_rope import FuseRope
from tests.passes.graphs import Build, after, aten, count

HEADS, WIDTH, CONTEXT = 3, 8, 32


def angles(rotary: int) -> torch.Tensor:
    """[CONTEXT, rotary / 2]"""
    return torch.arange(CONTEXT)[:, None] * 10.0 ** -torch.arange(rotary // 2)[None, :]


def heads(build: Build) -> fx.Node:
    return build.view(build.linear(build.hidden(6), HEADS * WIDTH, "q"), HEADS, WIDTH)


def half_turn(build: Build, x: fx.Node, rotary: int) -> fx.Node:
    first = build.call(aten.slice.Tensor, x, -1, 0, rotary // 2)
    second = build.call(aten.slice.Tensor, x, -1, rotary // 2, rotary)
    return build.call(aten.cat.default, [build.call(aten.neg.default, second), first], -1)


def turned(build: Build, x: fx.Node, cos: fx.Node, sin: fx.Node, rotated: fx.Node) -> fx.Node:
    straight = build.call(aten.mul.Tensor, x, cos)
    return build.call(aten.add.Tensor, straight, build.call(aten.mul.Tensor, rotated, sin))


def per_head(build: Build, name: str, value: torch.Tensor) -> fx.Node:
    return build.call(aten.unsqueeze.default, build.table(name, value), 1)


def rope_node(program):
    return next(node for node in program.graph.nodes if "rope" in str(node.target))


def test_full_rotation_over_doubled_tables():
    build = Build()
    table = torch.cat([angles(WIDTH)] * 2, -1)
    cos, sin = per_head(build, "cos", table.cos()), per_head(build, "sin", table.sin())
    q, k = heads(build), build.view(build.linear(build.hidden(6, "e2"), WIDTH, "k"), 1, WIDTH)
    before = build.finish(
        turned(build, q, cos, sin, half_turn(build, q, WIDTH)),
        turned(build, k, cos, sin, half_turn(build, k, WIDTH)),
    )
    program, result = after(FuseRope(), before)
    assert result.matches == count(program, "rope") == 2
    assert count(program, "position_table") == 2, "one cos and one sin table for both"
    assert {w.shape for name, w in program.weights.items() if "columns" in name} == {(CONTEXT, WIDTH // 2)}
    assert rope_node(program).args[3:] == (WIDTH, False)


def test_partial_rotation_passes_the_rest_through():
    build = Build()
    rotary = 4
    table = torch.cat([angles(rotary)] * 2, -1)
    cos, sin = per_head(build, "cos", table.cos()), per_head(build, "sin", table.sin())
    q = heads(build)
    part = build.call(aten.slice.Tensor, q, -1, 0, rotary)
    rest = build.call(aten.slice.Tensor, q, -1, rotary, WIDTH)
    rotated = turned(build, part, cos, sin, half_turn(build, part, rotary))
    program, result = after(FuseRope(), build.finish(build.call(aten.cat.default, [rotated, rest], -1)))
    assert result.matches == 1
    assert rope_node(program).args[3:] == (rotary, False)
    assert count(program, aten.cat.default) == 0


def test_interleaved_rotation_over_repeated_tables():
    build = Build()
    table = angles(WIDTH).repeat_interleave(2, -1) * 1.3
    cos, sin = build.table("cos", table.cos()[:, None]), build.table("sin", table.sin()[:, None])
    q = heads(build)
    even, odd = (build.call(aten.slice.Tensor, q, -1, i, WIDTH, 2) for i in (0, 1))
    pairs = build.call(aten.stack.default, [build.call(aten.neg.default, odd), even], -1)
    rotated = build.view(pairs, HEADS, WIDTH)
    program, result = after(FuseRope(), build.finish(turned(build, q, cos, sin, rotated)))
    assert result.matches == 1
    assert rope_node(program).args[3:] == (WIDTH, True)


def test_rotation_written_by_halves_over_one_table():
    build = Build()
    both = build.table("both", torch.cat([angles(WIDTH).sin(), angles(WIDTH).cos()], -1)[:, None])
    sin, cos = (build.call(aten.slice.Tensor, both, -1, i * WIDTH // 2, (i + 1) * WIDTH // 2) for i in (0, 1))
    q = heads(build)
    a, b = (build.call(aten.slice.Tensor, q, -1, i * WIDTH // 2, (i + 1) * WIDTH // 2) for i in (0, 1))

    def product(x, y):
        return build.call(aten.mul.Tensor, x, y)

    first = build.call(aten.sub.Tensor, product(a, cos), product(b, sin))
    second = build.call(aten.add.Tensor, product(b, cos), product(a, sin))
    program, result = after(FuseRope(), build.finish(build.call(aten.cat.default, [first, second], -1)))
    assert result.matches == 1
    assert rope_node(program).args[3:] == (WIDTH, False)


@pytest.mark.parametrize("fault", ["unequal halves", "wrong sign", "scaled"])
def test_what_is_not_a_rotation_stays(fault):
    build = Build()
    table = torch.cat([angles(WIDTH)] * 2, -1)
    cos = table.cos()
    if fault == "unequal halves":
        cos[CONTEXT - 1, 0] += 1e-3
    q = heads(build)
    rotated = half_turn(build, q, WIDTH)
    if fault == "wrong sign":
        rotated = build.call(aten.neg.default, build.call(aten.slice.Tensor, rotated, -1, 0, WIDTH))
        rotated = build.call(aten.cat.default, [build.call(aten.slice.Tensor, rotated, -1, 0, 4)] * 2, -1)
    scaled = build.call(aten.mul.Tensor, q, 2.0) if fault == "scaled" else q
    before = build.finish(
        turned(build, scaled, per_head(build, "cos", cos), per_head(build, "sin", table.sin()), rotated)
    )
    program, result = after(FuseRope(), before)
    assert result.matches == count(program, "rope") == 0


def test_wide_heads():
    build = Build()
    width = 512
    table = torch.cat([angles(2)] * width, -1)
    cos, sin = per_head(build, "cos", table.cos()), per_head(build, "sin", table.sin())
    q = build.view(build.linear(build.hidden(6), width, "q"), 1, width)
    program, result = after(FuseRope(), build.finish(turned(build, q, cos, sin, half_turn(build, q, width))))
    assert result.matches == 1
    assert rope_node(program).args[3:] == (width, False)


def test_pairs_read_side_by_side_and_written_apart():
    build = Build()
    cos, sin = per_head(build, "cos", angles(WIDTH).cos()), per_head(build, "sin", angles(WIDTH).sin())
    q = heads(build)
    even, odd = (build.call(aten.slice.Tensor, q, -1, i, WIDTH, 2) for i in (0, 1))

    def product(x, y):
        return build.call(aten.mul.Tensor, x, y)

    first = build.call(aten.sub.Tensor, product(even, cos), product(odd, sin))
    second = build.call(aten.add.Tensor, product(odd, cos), product(even, sin))
    program, result = after(FuseRope(), build.finish(build.call(aten.cat.default, [first, second], -1)))
    assert result.matches == 1
    assert rope_node(program).args[3:] == (WIDTH, True)
    assert count(program, aten.mul.Tensor) == 0
