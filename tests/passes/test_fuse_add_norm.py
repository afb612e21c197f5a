import pytest

from enginewright.passes.fuse_add_norm import FuseAddNorm
from tests.passes.graphs import Build, after, aten, count


def norm(build, kind, x, name):
    weight = build.weight(f"{name}.weight", x.meta["val"].shape[-1])
    if kind == "rms_norm":
        return build.call("rms_norm", x, weight, 1e-5, 1.0)
    return build.call("layer_norm", x, weight, build.weight(f"{name}.bias", 6), 1e-5)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_sum_and_norm_with_the_sum_read_again(kind):
    build = Build()
    x = build.hidden(6)
    total = build.call(aten.add.Tensor, x, build.linear(x, 6, "o"))
    first = norm(build, kind, total, "first")
    program, result = after(FuseAddNorm(), build.finish(first, total))
    assert result.matches == count(program, f"add_{kind}") == 1
    assert count(program, kind) == count(program, aten.add.Tensor) == 0


def test_two_norms_of_one_sum():
    build = Build()
    x = build.hidden(6)
    total = build.call(aten.add.Tensor, x, build.linear(x, 6, "o"))
    norms = [norm(build, "layer_norm", total, name) for name in ("first", "second")]
    program, result = after(FuseAddNorm(), build.finish(*norms))
    assert result.matches == count(program, "add_layer_norm") == count(program, "layer_norm") == 1


def test_sums_with_numbers_or_weights_stay():
    build = Build()
    x = build.hidden(6)
    shifted = build.call(aten.add.Tensor, x, 1.0)
    biased = build.call(aten.add.Tensor, x, build.weight("bias", 6))
    norms = [norm(build, "rms_norm", total, str(i)) for i, total in enumerate((shifted, biased))]
    program, result = after(FuseAddNorm(), build.finish(*norms))
    assert result.matches == count(program, "add_rms_norm") == 0
