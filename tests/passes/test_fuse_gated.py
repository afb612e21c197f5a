import pytest

from enginewright.passes.fuse_gated import FuseGated
from tests.passes.graphs import Build, after, aten, count


def halves(build, whole, spelling):
    width = whole.meta["val"].shape[-1]
    if spelling == "slice":
        return [
            build.call(aten.slice.Tensor, whole, -1, i * width // 2, (i + 1) * width // 2) for i in (0, 1)
        ]
    import operator

    parts = build.call(aten.split.Tensor, whole, width // 2, -1)
    return [build.call(operator.getitem, parts, i) for i in (0, 1)]


def product(build, gate, up):
    return build.call(aten.mul.Tensor, build.call("activation", gate, "silu"), up)


@pytest.mark.parametrize("spelling", ["slice", "split"])
def test_gate_then_up(spelling):
    build = Build()
    gate, up = halves(build, build.linear(build.hidden(6), 10, "gate_up"), spelling)
    program, result = after(FuseGated(), build.finish(product(build, gate, up)))
    assert result.matches == count(program, "gated_activation") == 1
    assert count(program, aten.mul.Tensor) == 0


@pytest.mark.parametrize("spelling", ["slice", "split"])
def test_up_then_gate_changes_places(spelling):
    build = Build()
    up, gate = halves(build, build.linear(build.hidden(6), 10, "up_gate", bias=True), spelling)
    program, result = after(FuseGated(), build.finish(product(build, gate, up)))
    assert result.matches == count(program, "gated_activation") == 1
    assert all(name.endswith(".swapped") for name in program.weights if name.startswith("up_gate"))


def test_up_then_gate_of_a_shared_linear_stays():
    build = Build()
    whole = build.linear(build.hidden(6), 10, "up_gate")
    up, gate = halves(build, whole, "slice")
    program, result = after(FuseGated(), build.finish(product(build, gate, up), whole))
    assert result.matches == count(program, "gated_activation") == 0


def test_overlapping_ranges_stay():
    build = Build()
    whole = build.linear(build.hidden(6), 10, "fc")
    gate, up = (build.call(aten.slice.Tensor, whole, -1, a, a + 5) for a in (0, 4))
    program, result = after(FuseGated(), build.finish(product(build, gate, up)))
    assert result.matches == count(program, "gated_activation") == 0
