import pytest

from enginewright.passes.fuse_siblings import FuseSiblings
from enginewright.passes.linears import joined_name
from enginewright.passes.program import Stage
from enginewright.passes.quant_formats import QuantisedWeight
from tests.passes.graphs import Build, after, aten, count


def attention(build, q, k, v):
    return build.call("attention", q, k, v, None, None, 0.5, 0, 0.0, 0)


def product(build, gate, up):
    return build.call(aten.mul.Tensor, build.call("activation", gate, "gelu"), up)


def quantised(build, x, width, name, weight_format):
    source = build.linear(x, width, name)
    whole = QuantisedWeight(build.program.weight_of(source.args[1]), weight_format)
    parts = [
        None if part is None else build.program.add_weight(f"{name}.{weight_format}.{kind}", part)
        for kind, part in (("codes", whole.codes), ("scales", whole.scales), ("offsets", whole.offsets))
    ]
    return build.call("quantised_linear", x, *parts, None, weight_format, "f32")


def test_query_key_value_with_a_bias_on_one():
    build = Build()
    x = build.hidden(6)
    widths = {"q": 8, "k": 4, "v": 4}
    q, k, v = (
        build.view(build.linear(x, width, f"layers.0.{name}", bias=name == "q"), width // 2, 2)
        for name, width in widths.items()
    )
    program, result = after(FuseSiblings(), build.finish(attention(build, q, k, v)))
    assert result.matches == count(program, "linear") == 1
    assert program.weights["layers.0.q+k+v.weight"].shape == (16, 6)
    assert program.weights["layers.0.q+k+v.bias"].shape == (16,)


def test_gate_comes_first_whatever_the_order():
    build = Build()
    x = build.hidden(6)
    up, gate = build.linear(x, 5, "mlp.up"), build.linear(x, 5, "mlp.gate")
    program, result = after(FuseSiblings(), build.finish(product(build, gate, up)))
    assert result.matches == count(program, "linear") == 1
    assert "mlp.gate+up.weight" in program.weights


@pytest.mark.parametrize("other", ["int4_g32", "int8"])
def test_quantised_linears_join_where_formats_agree(other):
    build = Build(Stage.QUANTISED)
    x = build.hidden(40)
    gate, up = quantised(build, x, 5, "mlp.gate", "int4_g32"), quantised(build, x, 5, "mlp.up", other)
    program, result = after(FuseSiblings(), build.finish(product(build, gate, up)), Stage.QUANTISED)
    agree = other == "int4_g32"
    assert result.matches == (1 if agree else 0)
    assert count(program, "quantised_linear") == (1 if agree else 2)
    assert bool(result.notes) != agree


def test_a_weight_with_another_use_stays_whole():
    build = Build()
    x = build.hidden(6)
    gate, up = build.linear(x, 5, "gate"), build.linear(x, 5, "up")
    again = build.call("linear", x, up.args[1], None)
    program, result = after(FuseSiblings(), build.finish(product(build, gate, up), again))
    assert result.matches == 0
    assert count(program, "linear") == 3


def test_linears_of_different_inputs_stay():
    build = Build()
    x, y = build.hidden(6), build.hidden(6, "other.weight")
    program, result = after(
        FuseSiblings(), build.finish(product(build, build.linear(x, 5, "gate"), build.linear(y, 5, "up")))
    )
    assert result.matches == 0
    assert count(program, "linear") == 2


def test_names_of_joined_weights():
    assert joined_name(["a.b.q.weight", "a.b.k.weight"]) == "a.b.q+k.weight"
    assert joined_name(["a.q.weight", "a.q.weight"]) == "a.q.weight"
    assert joined_name(["q", "k"]) == "q+k"
    assert joined_name(["a.b.x.w", "a.c.y.w"]) == "a.b_x+c_y.w"
