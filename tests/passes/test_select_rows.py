import torch

from enginewright.passes.manager import remove_dead_code
from enginewright.passes.program import Stage
from enginewright.passes.select_rows import SelectRows
from tests.passes.graphs import TOKENS, Build, aten, count


def selected(before):
    program = before.clone()
    result = SelectRows().run(program)
    program.stage = Stage.FINAL
    remove_dead_code(program)
    program.recompile()
    return program, result


def test_rows_are_cut_after_the_last_attention():
    build = Build()
    x = build.hidden(8)
    heads = build.view(x, 2, 4)
    mixed = build.view(build.call("attention", heads, heads, heads, None, None, 0.5, 0, 0.0, 0), 8)
    total = build.call(aten.add.Tensor, x, build.linear(mixed, 8, "o"))
    before = build.finish(build.linear(total, 11, "head"))
    want = before.run(TOKENS)
    program, result = selected(before)
    assert result.matches == count(program, "select_rows") == 2, "the attention's output and the residual"
    nodes = list(program.graph.nodes)
    linears = [n for n in nodes if "linear" in str(n.target)]
    assert all(n.meta["val"].shape[0] != program.tokens for n in linears), (
        "both linears run on the chosen rows"
    )
    for rows in ([6], [0, 3], range(7), [2, 2]):
        program.stage = Stage.QUANTISED  # the whole-sequence attention is enough to run it
        got = program.run(TOKENS, logit_rows=torch.tensor(list(rows), dtype=torch.int32))
        torch.testing.assert_close(got, want[list(rows)], rtol=1e-5, atol=1e-5)


def test_positions_and_inputs_are_cut_too():
    build = Build()
    x = build.hidden(8)
    heads = build.view(x, 2, 4)
    mixed = build.view(build.call("attention", heads, heads, heads, None, None, 0.5, 0, 0.0, 0), 8)
    late = build.call("embedding", build.positions, build.weight("late", 32, 8))
    program, result = selected(build.finish(build.call(aten.add.Tensor, mixed, late)))
    assert result.matches == 2
    first = next(i for i, n in enumerate(program.graph.nodes) if n.op == "call_function")
    assert not any(n.op in ("placeholder", "get_attr") for n in list(program.graph.nodes)[first:])


def test_without_attention_only_the_output_is_cut():
    build = Build()
    program, result = selected(build.finish(build.linear(build.hidden(6), 5, "fc")))
    assert result.matches == 1
    assert "select_rows" in str(program.graph.output_node().args[0].target)
