import pytest

from enginewright.passes import legality
from enginewright.passes.fold_scalars import FoldScalars
from enginewright.passes.fuse_rope import FuseRope
from enginewright.passes.manager import PassResult, Step, rules_of, run_steps
from enginewright.passes.program import Stage
from enginewright.recipes.errors import LoweringError
from tests.passes.graphs import Build, aten


def small():
    build = Build()
    x = build.linear(build.hidden(6), 5, "fc")
    return build, build.finish(build.call(aten.mul.Tensor, x, 1.0))


def test_records_progress_and_dumps(tmp_path):
    _, program = small()
    seen = []
    steps = [Step(FoldScalars(), Stage.FUSED, required=True), Step(FuseRope(), Stage.FUSED)]
    records = run_steps(program, steps, progress=lambda *args: seen.append(args), dump=tmp_path / "graphs")
    assert [(r.name, r.matches, r.nodes_before - r.nodes_after) for r in records] == [
        ("fold_scalars", 1, 1),
        ("fuse_rope", 0, 0),
    ]
    assert seen == [("fold_scalars", 0, 2), ("fuse_rope", 1, 2), (None, 2, 2)]
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert names == ["00_input.txt", "01_fold_scalars.txt", "02_fuse_rope.txt"]
    assert "ew.linear" in (tmp_path / "graphs" / names[2]).read_text()
    assert program.stage == Stage.FUSED


def test_a_required_pass_without_a_match_is_an_error():
    _, program = small()
    with pytest.raises(
        LoweringError, match=r"`fuse_rope` must match[\s\S]*passes so far: fold_scalars, fuse_rope"
    ):
        run_steps(program, [Step(FoldScalars(), Stage.FUSED), Step(FuseRope(), Stage.FUSED, required=True)])


def test_an_illegal_graph_names_node_module_and_passes():
    class Spoil:
        name, options = "spoil", {}

        def run(self, program):
            output = program.graph.output_node()
            last = output.args[0]
            output.args = (program.call(aten.flip.default, (last, [0]), module="layers.7.mlp"),)
            return PassResult(1)

    _, program = small()
    with pytest.raises(
        LoweringError, match=r"flip works along the token axis[\s\S]*layers.7.mlp[\s\S]*fold_scalars, spoil"
    ):
        run_steps(program, [Step(FoldScalars(), Stage.FUSED), Step(Spoil(), Stage.FUSED)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: b.call(aten.sum.dim_IntList, b.x, [0]), "loses the token axis"),
        (lambda b: b.call(aten.cumsum.default, b.x, 0), "works along the token axis"),
        (lambda b: b.call(aten.transpose.int, b.x, 0, 1), "loses the token axis"),
        (lambda b: b.call(aten.mm.default, b.x, b.weight("w", 6, 6)), "not on the list"),
        (lambda b: b.call("select_rows", b.x, b.positions), "may stand from FINAL"),
        (lambda b: b.call("rms_norm", b.x, None, 1e-5, 0.5), "weight_offset = 0.5; allowed: 0.0, 1.0"),
    ],
)
def test_what_is_refused(make, message):
    build = Build()
    build.x = build.hidden(6)
    build.program.graph.output_node().args = (make(build),)
    with pytest.raises(LoweringError, match=message):
        legality.check(build.program)


def test_rules_are_the_docstring_of_the_pass():
    assert "Rules" in rules_of(FuseRope()) and "1. " in rules_of(FuseRope())


def test_every_dialect_op_has_a_span_and_known_attributes():
    from enginewright.passes.dialect import OPS

    assert legality.SPAN.keys() == OPS.keys()
    for name, attributes in legality.ATTRIBUTES.items():
        known = {argument.name for argument in OPS[name]._schema.arguments}
        assert attributes.keys() <= known
