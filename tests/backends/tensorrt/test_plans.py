"""Plans built without a GPU: what they say about themselves, and how a builder that fails is told.

The plans of the real models are built by `make proof`.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx")

from enginewright.backends.tensorrt import estimate
from enginewright.backends.tensorrt.api import log, new_network
from enginewright.backends.tensorrt.bindings import Limits
from enginewright.backends.tensorrt.build import Refusal, build_plan, in_child
from enginewright.backends.tensorrt.lower import define
from enginewright.backends.tensorrt.plan_text import PlanText, read_plan
from enginewright.build import optimize
from enginewright.recipes.errors import EnginewrightError, InputError, LoweringError
from tests.backends.tensorrt.programs import final_of
from tests.passes.architectures import folder, save

LIMITS = Limits(sequences=4, tokens=32, context=256, page_size=16, pages=(64,))
HIDDEN, HEAD, INNER = 128, 64, 256


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers whose sizes have fused kernels, with its head tied."""
    return save(
        "llama",
        tmp_path_factory.mktemp("models") / "llama",
        hidden_size=HIDDEN,
        head_dim=HEAD,
        intermediate_size=INNER,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )


@pytest.fixture(scope="module")
def plan(small: Path, tmp_path_factory: pytest.TempPathFactory) -> PlanText:
    program, _ = final_of(
        small, "int4", "compute=f16", "linear.activation=f16", "head.activation=f16", "kv_cache.format=f16"
    )
    network, builder = new_network()
    lowered = define(program, network)
    path = tmp_path_factory.mktemp("plans") / "plan.engine"
    own = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )  # of these tests, which the builder's process begins with
    built = build_plan(lowered, builder, ["sm80"], LIMITS, path)
    assert built.size == path.stat().st_size > lowered.weight_bytes
    needed = estimate.estimate(lowered.weight_bytes, program.facts.kv_groups, LIMITS)
    assert 0 < built.peak < needed.host + own
    return read_plan(path)


def test_a_plan_says_its_architecture_and_has_a_graph_a_profile(plan: PlanText) -> None:
    assert plan.architectures == ["sm80"]
    assert len(plan.graphs) == 2
    assert 0 < plan.scratch < 1 << 28


def test_int4_matrices_stay_4_bits(plan: PlanText) -> None:
    heads = (4 + 2 * 2) * HEAD  # q, k and v, joined
    one = [HIDDEN * heads, 4 * HEAD * HIDDEN, HIDDEN * 2 * INNER, INNER * HIDDEN]
    for graph in plan.graphs:
        found = sorted(payload.size for payload in graph.payloads if payload.type == "int4")
        assert found == sorted(size // 2 for size in one * 2)


def test_a_tied_table_is_stored_once(plan: PlanText) -> None:
    assert [p.size for p in plan.payloads if p.type == "int8"] == [131 * HIDDEN]


def test_every_quantised_linear_is_one_kernel(plan: PlanText) -> None:
    """Whoever reads the codes multiplies with them, in the decode and in the chunk graph."""
    for graph in plan.graphs:
        for name in [payload.name for payload in graph.payloads if payload.type == "int4"]:
            readers = graph.readers(name)
            assert len(readers) == 1 and readers[0].multiplies, (name, readers)


def test_attention_is_fused_and_pools_are_updated_in_place(plan: PlanText) -> None:
    pools = {f"{kind}_pool_0_{layer}_out" for kind in ("key", "value") for layer in (0, 1)}
    for graph in plan.graphs:
        assert len(graph.attentions()) == 2
        assert graph.aliased == pools


# The child that builds.


def _raises() -> None:
    log().log(log().Severity.ERROR, "the library's own words")
    raise Refusal("the builder returned nothing")


def _aborts() -> None:
    os.write(2, b"CHECK(tactic.valid()) failed\n")
    os.abort()


def _bad_allocation() -> None:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _no_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("work", "kind", "told"),
    [
        (_raises, LoweringError, "the library's own words"),
        (_aborts, LoweringError, r"CHECK(tactic.valid()) failed"),
        (_killed, LoweringError, "somebody killed the process that builds it (SIGKILL)"),
        (_bad_allocation, InputError, "memory ran out"),
        (_no_memory, InputError, "memory ran out"),
    ],
)
def test_a_builder_that_fails_is_told_and_leaves_this_process_alone(
    work: Callable[[], None], kind: type[EnginewrightError], told: str
) -> None:
    with pytest.raises(kind) as caught:
        in_child(work, "the plan for sm80")
    assert told in str(caught.value) and "the plan for sm80 could not be built" in str(caught.value)


def test_a_network_that_the_library_refuses_is_told_with_its_lines(small: Path, tmp_path: Path) -> None:
    program, _ = final_of(small)
    network, builder = new_network()
    lowered = define(program, network)
    network.unmark_output(network.get_output(0))  # a pool that is updated must be an output
    with pytest.raises(LoweringError, match="refuses the network") as caught:
        build_plan(lowered, builder, ["sm80"], LIMITS, tmp_path / "plan.engine")
    assert "[ERROR]" in str(caught.value)
    assert not (tmp_path / "plan.engine").exists()


def test_an_interrupt_ends_the_child() -> None:
    seen: list[float] = []

    def interrupted(seconds: float) -> None:
        seen.append(seconds)
        raise KeyboardInterrupt

    def forever() -> None:
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        in_child(forever, "the plan", interrupted)
    assert seen
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize(("sequences", "tokens"), [(32, 10**11), (10**11, 32), (1 << 16, 1 << 15)])
def test_a_step_that_no_plan_takes_is_refused_before_any_work(
    sequences: int, tokens: int, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no plan takes such a step"):
        optimize(
            folder("llama"),
            "fp16",
            tmp_path / "out",
            backend="tensorrt",
            target="sm80",
            overrides=[f"tensorrt.sequences={sequences}", f"tensorrt.tokens={tokens}"],
        )


def test_too_little_memory_is_told_before_building() -> None:
    needed = estimate.estimate(10**9, [], LIMITS)
    estimate.require_memory(needed, needed.host)
    estimate.require_memory(needed, None)
    with pytest.raises(InputError, match="too little memory") as caught:
        estimate.require_memory(needed, needed.host - 1)
    assert "1.00 GB of weights" in str(caught.value)
    known = estimate.available_memory()
    assert known is None or known > 0
