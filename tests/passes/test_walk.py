"""The calibration walk: many samples at once give each sample's own values; what is dropped, kept and spilled to disk."""

import tempfile

import pytest
import torch

from enginewright.passes.dialect import OPS
from enginewright.passes.matching import argument, is_call
from enginewright.passes.program import Execution
from enginewright.passes.walk import Walk, _Values
from enginewright.passes.weights import ConstantTensor
from tests.passes.architectures import ARCHITECTURES
from tests.passes.families import family, some_tokens
from tests.passes.graphs import Build, aten

UNEQUAL = [some_tokens(length, seed=length) for length in (3, 17, 9, 2, 13)]
EQUAL = [some_tokens(11, seed=seed) for seed in range(4)]


def values_of(program, tokens):
    """node -> its value for one sequence, as `Program.run` computes it."""
    found = {}

    class Recording(Execution):
        def run_node(self, node):
            found[node.name] = super().run_node(node)
            return found[node.name]

    Recording(program).evaluate(
        {
            "tokens": torch.tensor(tokens, dtype=torch.int32),
            "positions": torch.arange(len(tokens), dtype=torch.int32),
        }
    )
    return found


def matrices(program):
    return [n for n in program.graph.nodes if is_call(n, OPS["linear"], OPS["moe"])]


def walked(program, sequences, **options):
    """matrix node -> its inputs for all samples, one after the other; and the walk."""
    walk, seen = Walk(program, sequences, **options), {}

    def look(node):
        seen[node] = torch.cat([x.clone() for x in walk.inputs(argument(node, "x"))])

    walk.run(dict.fromkeys(matrices(program), look))
    return seen, walk


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_family_sees_what_each_sample_alone_sees(arch):
    """Samples of one length go through another attention than samples of many; both in batches of several."""
    program = family(arch)
    for sequences in (UNEQUAL, EQUAL):
        seen, walk = walked(program, sequences, batch_tokens=24)
        assert 1 < len(walk.batches) < len(sequences)
        alone = [values_of(program, tokens) for tokens in sequences]
        assert list(seen) == matrices(program)
        for node, got in seen.items():
            x = argument(node, "x").name
            want = torch.cat([values[x] for values in alone])
            assert got.shape == want.shape  # nothing is padded
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("batch_tokens", [1, 20, 4096])
def test_a_batch_holds_whole_samples(batch_tokens):
    walk = Walk(family("llama"), UNEQUAL, batch_tokens=batch_tokens)
    lengths = [batch.lengths for batch in walk.batches]
    assert lengths == {1: [[3], [17], [9], [2], [13]], 20: [[3, 17], [9, 2], [13]]}.get(
        batch_tokens, [[3, 17, 9, 2, 13]]
    )


def test_a_window_holds_within_each_sample():
    """Longer than the window of 8, of one length and of several: tokens beyond it are not seen."""
    program = family("mistral")
    for sequences in (UNEQUAL, EQUAL):
        seen, _ = walked(program, sequences)
        changed = [[tokens[0] % 100 + 20, *tokens[1:]] for tokens in sequences]
        other, _ = walked(program, changed)
        output = next(n for n in seen if "o_proj" in str(argument(n, "weight").target))
        start = 0
        for tokens in sequences:
            rows = slice(start, start + len(tokens))
            same = (seen[output][rows] == other[output][rows]).all(-1)
            assert not same[0] and same[8:].all()
            start += len(tokens)


def two_linears():
    build = Build()
    x = build.hidden(8)
    first = build.linear(x, 8, "first")
    second = build.linear(build.call("activation", first, "silu"), 8, "second")
    return build.finish(second), first, second


def test_a_replacement_is_seen_downstream():
    program, first, second = two_linears()
    walk, seen = Walk(program, [[1, 2, 3], [4, 5]]), []

    def negate(node):
        weight = program.add_weight("other", ConstantTensor("other", -program.weights["first.weight"].load()))
        new = program.call(OPS["linear"], (argument(node, "x"), weight, None), before=node)
        node.replace_all_uses_with(new)
        program.graph.erase_node(node)
        return new

    walk.run({first: negate, second: lambda node: seen.extend(walk.inputs(argument(node, "x")))})
    rows = program.weights["embed.weight"].load()[[1, 2, 3, 4, 5]]
    negated = -(rows @ program.weights["first.weight"].load().T)
    torch.testing.assert_close(seen[0], torch.nn.functional.silu(negated))


def chain(length, width=16):
    build = Build()
    x = build.hidden(width)
    for i in range(length):
        x = build.linear(x, width, f"layer_{i}")
    return build.finish(x)


def test_values_are_dropped_after_their_last_use():
    program = chain(12)
    nodes = matrices(program)
    walk = Walk(program, [[1, 2, 3]] * 4)
    walk.run({nodes[-1]: lambda node: None})
    one = 4 * 3 * 16 * 4
    assert walk.peak_bytes <= 3 * one, "an input, an output, and the tokens"
    kept = Walk(program, [[1, 2, 3]] * 4, keep=[(node, nodes[-1]) for node in nodes])
    kept.run({nodes[-1]: lambda node: None})
    assert kept.peak_bytes >= 11 * one
    assert kept.spilled_bytes == walk.spilled_bytes == 0


@pytest.mark.parametrize("arch", ["gemma3_text", "deepseek_v3"])
def test_beyond_the_limit_values_wait_on_disk(arch, tmp_path, monkeypatch):
    """Bitwise the same results; the limit holds but for the batch at hand; no file is left."""
    program = family(arch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    free, plain = walked(program, UNEQUAL, batch_tokens=12)
    assert plain.spilled_bytes == 0 and not list(tmp_path.iterdir())
    limit = plain.peak_bytes // 4
    tight, walk = walked(program, UNEQUAL, batch_tokens=12, memory_bytes=limit)
    assert walk.spilled_bytes > 0 and not list(tmp_path.iterdir())
    assert walk.peak_bytes < plain.peak_bytes
    assert all(torch.equal(tight[node], free[node]) for node in free)


def test_what_is_used_latest_waits_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second, third = matrices(chain(3))
    next_use = {first: 9, second: 5, third: 7}
    values = _Values(memory_bytes=2 * 256, batches=1)
    for node in next_use:
        values.put(node, 0, torch.zeros(64), 0, lambda node, place: next_use[node])
    assert [node for node in next_use if not isinstance(values.held[node][0], torch.Tensor)] == [first]
    assert torch.equal(values.get(first, 0), torch.zeros(64)) and values.bytes == 2 * 256
    values.close()


def test_files_go_when_a_visitor_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = chain(4)
    walk = Walk(program, [[1, 2, 3]] * 4, batch_tokens=3, memory_bytes=1)

    def fail(node):
        assert list(tmp_path.glob("*/*.pt"))
        raise KeyError("of the visitor")

    with pytest.raises(KeyError, match="of the visitor"):
        walk.run({matrices(program)[-1]: fail})
    assert not list(tmp_path.iterdir())


def test_values_are_kept_on_request():
    program, first, second = two_linears()
    x, seen = argument(first, "x"), []
    walk = Walk(program, [[1, 2], [3]], keep=[(x, second)])
    walk.run({second: lambda node: seen.extend(walk.inputs(x))})
    torch.testing.assert_close(seen[0], program.weights["embed.weight"].load()[[1, 2, 3]])
    walk = Walk(program, [[1, 2], [3]])
    with pytest.raises(KeyError):
        walk.run({second: lambda node: next(walk.inputs(x))})


def test_only_what_is_needed_is_computed_unless_the_whole_is_asked_for():
    def aside(whole):
        build = Build()
        x = build.hidden(8)
        left, right = build.linear(x, 8, "left"), build.linear(x, 8, "right")
        late = build.linear(right, 8, "late")
        program = build.finish(late, left)
        found = []
        walk = Walk(program, [[1, 2]])

        def look(node):
            with_left = build.call(aten.add.Tensor, left, right)
            found.append(walk.evaluate_with([with_left], 0, {})[with_left])

        values = values_of(program, [1, 2])
        walk.run({late: look}, whole=whole)
        return found[0], (values[left.name], values[right.name])

    found, values = aside(whole=True)
    torch.testing.assert_close(found, values[0] + values[1])
    with pytest.raises(KeyError, match="linear"):
        aside(whole=False)


def test_evaluation_with_other_values():
    """`given` stands in for a node's own value, for weights too; `wanted` alone comes back."""
    program, first, second = two_linears()
    walk, found = Walk(program, [[1, 2, 3]]), []
    x = argument(first, "x")
    nodes = [first, argument(second, "x"), second]
    zero = torch.zeros(8, 8)

    def look(node):
        found.append(walk.evaluate_with(nodes, 0, {}))
        found.append(walk.evaluate_with(nodes, 0, {argument(first, "weight"): zero}, wanted=[second]))
        found.append(walk.evaluate_with(nodes, 0, {first: torch.ones(3, 8)}, wanted=[second]))

    walk.run({first: look}, whole=True)
    plain, zeroed, ones = found
    assert set(plain) == set(nodes) and x not in plain
    values = values_of(program, [1, 2, 3])
    assert torch.equal(plain[second], values[second.name])
    assert set(zeroed) == set(ones) == {second}
    assert not zeroed[second].any()
    matrix = program.weights["second.weight"].load()
    silu = torch.nn.functional.silu(torch.ones(3, 8))
    torch.testing.assert_close(ones[second], silu @ matrix.T)


def test_what_is_kept_is_computed_although_no_visited_node_needs_it():
    build = Build()
    x = build.hidden(8)
    aside, late = build.linear(x, 8, "aside"), build.linear(x, 8, "late")
    program, seen = build.finish(late, aside), []
    walk = Walk(program, [[1, 2]], keep=[(aside, late)])
    walk.run({late: lambda node: seen.extend(walk.inputs(aside))})
    torch.testing.assert_close(seen[0], values_of(program, [1, 2])[aside.name])
