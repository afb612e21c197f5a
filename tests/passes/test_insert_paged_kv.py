import pytest
import torch

from enginewright.passes.dialect import OPS
from enginewright.passes.insert_paged_kv import InsertPagedKv
from enginewright.passes.legality import check
from enginewright.passes.manager import remove_dead_code
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Stage
from enginewright.recipes.errors import LoweringError
from tests.passes.graphs import TOKENS, Build, count
from tests.passes.paged import Pools


def three_layers():
    """Windows 0, 4, 0; keys and values of unlike widths; sinks, alibi and a softcap somewhere."""
    build = Build()
    x = build.hidden(6)
    sinks, alibi = (
        build.weight("sinks", 4),
        build.weight("alibi", value=torch.rand(4, generator=build.generator)),
    )
    for i, window in enumerate((0, 4, 0)):
        q = build.view(build.linear(x, 20, f"q{i}"), 4, 5)
        k = build.view(build.linear(x, 10, f"k{i}"), 2, 5)
        v = build.view(build.linear(x, 6 + 4 * i, f"v{i}"), 2, 3 + 2 * i)
        args = (sinks if i == 0 else None, alibi if i == 1 else None, 0.4, window, 2.0 * (i == 2), i)
        mixed = build.call("attention", q, k, v, *args)
        x = build.linear(build.view(mixed, 4 * (3 + 2 * i)), 6, f"o{i}")
    return build.finish(x)


def test_groups_by_window_and_equal_in_any_chunks():
    before = three_layers()
    want = before.run(TOKENS)
    program = before.clone()
    result = InsertPagedKv(page_size=4).run(program)
    program.stage = Stage.PAGED
    remove_dead_code(program)
    program.recompile()
    assert result.matches == count(program, "paged_attention") == 3
    assert count(program, "attention") == 0
    groups = program.facts.kv_groups
    assert [(g.window, len(g.layers)) for g in groups] == [(0, 2), (4, 1)]
    assert [(at.kv_heads, at.key_dim, at.value_dim) for at in groups[0].layers] == [(2, 5, 3), (2, 5, 7)]
    assert before.facts.kv_groups == []
    for chunks in ([7], [3, 4], [1] * 7):
        pools = Pools(program, page_size=4)
        got, start = [], 0
        for size in chunks:
            got.append(pools.step(TOKENS[start : start + size], start))
            start += size
        assert (torch.cat(got) - want).abs().max() <= 1e-5 * want.abs().max()


def test_layers_have_their_own_formats():
    before = three_layers()
    want = before.run(TOKENS)
    results = {}
    for kv_format, layer_formats in (("f32", {}), ("int8", {}), ("int8", {1: "f32", 2: "bf16"})):
        program = before.clone()
        InsertPagedKv(4, kv_format, layer_formats).run(program)
        program.stage = Stage.PAGED
        remove_dead_code(program)
        check(program)
        nodes = [n for n in program.graph.nodes if is_call(n, OPS["paged_attention"])]
        formats = [layer_formats.get(i, kv_format) for i in range(3)]
        assert [argument(node, "kv_format") for node in nodes] == formats
        groups = program.facts.kv_groups
        assert [[at.format for at in g.layers] for g in groups] == [[formats[0], formats[2]], [formats[1]]]
        program.recompile()
        results[tuple(formats)] = (Pools(program, page_size=4).step(TOKENS, 0) - want).abs().max()
    exact, rounded, mixed = results.values()
    assert exact <= 1e-5 * want.abs().max() and rounded != mixed
    assert exact < min(rounded, mixed) and max(rounded, mixed) < 0.2 * want.abs().max()
    assert InsertPagedKv(4, "int8", {1: "f32"}).options == {
        "page_size": 4,
        "kv_format": "int8",
        "layer_formats": {1: "f32"},
    }


def test_a_format_the_cache_does_not_have_is_illegal():
    program = three_layers()
    InsertPagedKv(4, "fp4").run(program)
    program.stage = Stage.PAGED
    remove_dead_code(program)
    with pytest.raises(LoweringError, match=r"kv_format = 'fp4'; allowed: f32, f16, bf16, int8"):
        check(program)


def test_a_graph_without_attention_stays():
    build = Build()
    program = build.finish(build.linear(build.hidden(6), 5, "fc"))
    result = InsertPagedKv().run(program)
    assert result.matches == 0
    assert [n.target for n in program.graph.nodes if n.op == "placeholder"] == ["tokens", "positions"]
