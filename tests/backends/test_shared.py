"""What every backend must do, in one file: steps of every shape, whose logits are those of the Program.

The judge of a sequence's rows is the reference executor over the same final Program, the whole sequence in one step; for the
reference itself it is the Program before its attention was paged. Rows may differ by the case's bound, a share of the
largest logit; their best token may differ only where the judge's best two are closer than twice the bound. Pools start full
of NaN and pages lie in a shuffled order, so that whatever reads a slot it must not see shows.

A network of TensorRT is interpreted twice. `tensorrt-exact` keeps what it computes in float32, and the judge rounds no activation
either: then nothing but the order of sums is left, and a fault of the lowering has nowhere to hide. `tensorrt` rounds to the
types that the network states. Models with such large random weights magnify that rounding, in the judge too, so its bound is
1e-3 or, if that is more, three times what f16 costs the judge itself.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginewright.backends.base import Executor, StepError, StepInput
from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.passes.dialect import OPS
from enginewright.passes.manager import run_steps
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.recipes.recipe import Recipe, load_recipe
from tests.backends.stepping import Floats, Stepper, alone
from tests.backends.test_architectures import normalised
from tests.passes.architectures import ARCHITECTURES

PAGES = 24
"""Of each KV group: 384 positions in pages of 16."""

_RANDOM = torch.Generator().manual_seed(20)
SEQUENCES = {
    name: torch.randint(3, 130, (length,), generator=_RANDOM).tolist()
    for name, length in (("short", 3), ("middle", 17), ("long", 64), ("other", 43), ("tail", 24))
}
#: `long` as far as 53 tokens, then as if what was proposed after them had been wrong.
SEQUENCES["corrected"] = SEQUENCES["long"][:53] + SEQUENCES["other"][:8]


@dataclasses.dataclass(frozen=True)
class Case:
    """A backend, an architecture and a recipe with overrides. bound: of an error, over the largest logit.

    tips: the share of rows that may miss it, because a tie between experts or between two codes was decided otherwise.
    """

    backend: str
    arch: str
    recipe: str = "fp16"
    overrides: tuple[str, ...] = ()
    bound: float = 1e-3
    tips: float = 0.0

    def __str__(self) -> str:
        return "-".join(
            [self.backend, self.arch, self.recipe, *(o.rpartition("=")[2] for o in self.overrides)]
        )

    @property
    def settings(self) -> tuple[str, str, tuple[str, ...]]:
        return self.arch, self.recipe, self.overrides


# Backends: each makes an executor of a final Program.


def _reference(program: Program, recipe: Recipe) -> Executor:
    return ReferenceExecutor(program, max_tokens=128)


def _cpu(program: Program, recipe: Recipe) -> Executor:
    executor = pytest.importorskip("enginewright.backends.cpu.executor")
    from enginewright.backends.cpu.lower import lower

    with tempfile.TemporaryDirectory() as directory:  # mapped files stay when their names have gone
        lower(program, recipe, Path(directory))
        return executor.CpuExecutor(
            Path(directory) / "program.json", Path(directory) / "weights.bin", threads=2, max_tokens=128
        )


def _tensorrt(program: Program, recipe: Recipe, rounding: bool = True) -> Executor:
    pytest.importorskip("tensorrt_rtx")
    from enginewright.backends.tensorrt.api import new_network
    from enginewright.backends.tensorrt.interpreter.executor import InterpretedExecutor
    from enginewright.backends.tensorrt.lower import define

    network, _ = new_network()
    lowered = define(program, network)
    return InterpretedExecutor(
        network,
        lowered.arrays,
        groups=program.facts.kv_groups,
        vocab_size=program.facts.vocab_size,
        max_context=program.facts.max_context,
        max_tokens=128,
        rounding=rounding,
    )


def _onnx(program: Program, recipe: Recipe) -> Executor:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from enginewright.backends.onnx.executor import OnnxExecutor
    from enginewright.backends.onnx.lower import MODEL_FILE, lower

    with tempfile.TemporaryDirectory() as directory:  # mapped files stay when their names have gone
        lower(program, recipe, Path(directory))
        return OnnxExecutor(Path(directory) / MODEL_FILE, threads=1, max_tokens=128)


BACKENDS: dict[str, Callable[[Program, Recipe], Executor]] = {
    "reference": _reference,
    "cpu": _cpu,
    "onnx": _onnx,
    "tensorrt": _tensorrt,
    "tensorrt-exact": functools.partial(_tensorrt, rounding=False),
}

_MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
#: Every architecture with all in one step. For reference, cpu and onnx it is a proof: files of their own have them every day.
EVERY = [
    case
    for arch in ARCHITECTURES
    for case in (
        pytest.param(Case("reference", arch, "fp32", bound=1e-4), marks=pytest.mark.slow),
        pytest.param(Case("cpu", arch, "fp32", bound=1e-4), marks=pytest.mark.slow),
        pytest.param(Case("onnx", arch, "fp32", bound=1e-4), marks=pytest.mark.slow),
        Case("tensorrt-exact", arch, bound=1e-5),
        Case("tensorrt", arch, tips=0.05 if arch in _MIXTURES else 0.0),
    )
]
_HALF = ("compute=f16", "kv_cache.format=f16")
_WEIGHT_ONLY = (*_HALF, "linear.activation=f16", "head.activation=f16")
_WIDE = ("compute=f32", "kv_cache.format=f32", "linear.activation=f32", "head.activation=f32")
_BOTH = (*_HALF, "linear.activation=int8", "head.activation=int8")
#: A handful with every scenario.
SOME = [
    case
    for arch in ("llama", "gemma3_text")
    for case in (
        Case("reference", arch, "fp32", bound=1e-4),
        Case("reference", arch, "int4", _WIDE, bound=1e-4),
        Case("cpu", arch, "fp32", bound=1e-4),
        Case("onnx", arch, "fp32", bound=1e-4),
        Case("onnx", arch, "int4", _WIDE, bound=1e-4),
        Case("tensorrt-exact", arch, bound=1e-5),
        Case("tensorrt", arch),
        Case("tensorrt-exact", arch, "int4", _WEIGHT_ONLY, bound=1e-4),  # the offsets' correction is f16
        Case("tensorrt-exact", arch, "int8", _WEIGHT_ONLY, bound=1e-5),
        Case("tensorrt-exact", arch, "int8", _BOTH, bound=1e-5),
    )
]


@functools.cache
def programs(settings: tuple[str, str, tuple[str, ...]]) -> tuple[Program, Program, Recipe]:
    """The final Program of an architecture by a recipe, what it was before its attention was paged, and the recipe."""
    arch, name, overrides = settings
    recipe = load_recipe(name, [*overrides, *(["kv_cache.format=f32"] if name == "fp32" else [])])
    program = normalised(arch).clone()
    order = steps(recipe)
    paged = next(i for i, step in enumerate(order) if step.rewrite.name == "insert_paged_kv")
    run_steps(program, order[:paged])
    whole = program.clone()
    run_steps(program, order[paged:])
    return program, whole, recipe


@functools.cache
def judged(case: Case) -> dict[str, Floats]:
    """The judge's logits of every row of every sequence."""
    program, whole, _ = programs(case.settings)
    if case.backend == "reference":
        return {name: whole.run(tokens).numpy() for name, tokens in SEQUENCES.items()}
    if case.backend == "tensorrt-exact":
        program = unrounded(program)
    return alone(ReferenceExecutor(program), SEQUENCES, 128)


def unrounded(program: Program) -> Program:
    """The Program with what it rounds to 16 bits, activations, keys and values, left in f32.

    Scales of int8 weights that meet such activations become f16: TensorRT wants a scale of its result's type.
    """
    program = program.clone()
    for node in list(program.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.target is OPS["quantised_linear"] and node.args[5:7] == ("int8", "f16"):
            with program.graph.inserting_before(node):
                for dtype in (torch.float16, torch.float32):
                    cast = torch.ops.aten._to_copy.default
                    node.update_arg(2, program.graph.call_function(cast, (node.args[2],), {"dtype": dtype}))
        for i, argument in enumerate(schema.arguments if schema else ()):
            if argument.name not in ("activation_format", "kv_format"):
                continue
            if i < len(node.args) and node.args[i] in ("f16", "bf16"):
                node.update_arg(i, "f32")
            elif node.kwargs.get(argument.name) in ("f16", "bf16"):
                node.update_kwarg(argument.name, "f32")
    return program


def spread(found: dict[str, Floats], want: dict[str, Floats]) -> float:
    """The largest difference, over the largest logit."""
    largest = max(np.abs(rows).max() for rows in want.values())
    return float(max(np.abs(found[name] - rows).max() for name, rows in want.items()) / largest)


class Judge:
    """Holds rows against the judge's. `worst`: each row's largest error, over the largest logit; `ties`: other best tokens."""

    def __init__(self, case: Case) -> None:
        self.bound, self.want = case.bound, judged(case)
        if case.backend == "tensorrt":
            exact = dataclasses.replace(case, backend="tensorrt-exact")
            self.bound = max(self.bound, 3 * spread(self.want, judged(exact)))
        self.largest = max(float(np.abs(rows).max()) for rows in self.want.values())
        self.worst: list[float] = []
        self.where: list[str] = []
        self.ties = 0

    def check(self, name: str, first: int, found: Floats) -> None:
        """`found` are the sequence's rows from position `first` on."""
        want = self.want[name][first : first + len(found)]
        assert found.shape == want.shape and np.isfinite(found).all(), f"{name} from {first}"
        error = np.abs(found - want).max(1) / self.largest
        best, second = np.sort(want)[:, :-3:-1].T
        other = (found.argmax(1) != want.argmax(1)) & (error <= self.bound)
        assert not (other & (best - second >= 2 * self.bound * self.largest)).any(), (
            f"{name} from {first}: another best token"
        )
        self.ties += int(other.sum())
        self.worst += error.tolist()
        self.where += [f"{name}[{first + i}]" for i in range(len(found))]

    def conclude(self, tips: float) -> None:
        worst = np.array(self.worst)
        missed = worst > self.bound
        at = int(worst.argmax())
        assert missed.mean() <= tips, (
            f"{missed.sum()} of {len(worst)} rows miss {self.bound:.1e}; {self.where[at]}: {worst[at]:.2e}"
        )
        assert self.ties <= len(worst) // 20


class Steps:
    """A Stepper whose sequences may stand under a name of their own: every row that it feeds is checked."""

    def __init__(self, executor: Any, judge: Judge) -> None:
        self.stepper, self.judge = Stepper(executor, PAGES), judge

    def feed(self, **rows: tuple[str, int]) -> None:
        """Feed `name=(sequence, up to)` in one step: the sequence's tokens from where `name` stands."""
        begun = {name: self.stepper.lengths.get(name, 0) for name in rows}
        tokens = {name: SEQUENCES[text][begun[name] : end] for name, (text, end) in rows.items()}
        for name, found in self.stepper.feed(**tokens).items():
            self.judge.check(rows[name][0], begun[name], found)


# Scenarios.


def whole_prompts(steps: Steps) -> None:
    for name, tokens in SEQUENCES.items():
        steps.feed(**{name: (name, len(tokens))})


def chunks_at_an_offset(steps: Steps) -> None:
    for end in (5, 16, 33, 34, 64):
        steps.feed(a=("long", end))


def decoding(steps: Steps) -> None:
    steps.feed(a=("middle", 10))
    for end in range(11, 18):
        steps.feed(a=("middle", end))


def unequal_prompts_in_one_step(steps: Steps) -> None:
    steps.feed(a=("short", 3), b=("middle", 17), c=("long", 64))


def a_mixed_batch_of_five(steps: Steps) -> None:
    """Two decodes, a whole prompt, a chunk at an offset, and four proposed tokens after 50 cached ones and the pending one."""
    steps.feed(a=("other", 42), b=("short", 2), d=("tail", 10), e=("long", 50))
    steps.feed(a=("other", 43), b=("short", 3), c=("middle", 17), d=("tail", 24), e=("long", 55))


def proposals_that_are_taken_back(steps: Steps) -> None:
    """Three of five tokens stay; what was written for the others is written over."""
    steps.feed(a=("long", 50))
    steps.feed(a=("long", 58))
    steps.stepper.lengths["a"] = 53
    steps.feed(a=("corrected", 54))
    steps.feed(a=("corrected", 61))


def copied_pages_that_diverge(steps: Steps) -> None:
    stepper = steps.stepper
    steps.feed(a=("long", 53))
    for g in range(len(stepper.groups)):
        pages = stepper.tables[g]["a"]
        copies = [stepper.free[g].pop(0) for _ in pages]
        stepper.executor.copy_pages(g, pages, copies)
        stepper.tables[g]["b"] = copies
    stepper.lengths["b"] = 53
    steps.feed(a=("long", 58), b=("corrected", 56))
    steps.feed(b=("corrected", 61), a=("long", 64))


def few_rows_or_none(steps: Steps) -> None:
    stepper = steps.stepper

    def rows(wanted: Sequence[int], **tokens: list[int]) -> Floats:
        step = stepper.step_of(**tokens)
        found: Floats = stepper.executor.step(
            dataclasses.replace(step, logit_rows=np.array(wanted, np.int32))
        )
        assert found.shape == (len(wanted), stepper.executor.vocab_size) and found.dtype == np.float32
        return found

    long, middle = SEQUENCES["long"], SEQUENCES["middle"]
    rows([], a=long[:20])
    found = rows([32, 3], a=long[20:40], b=middle)  # rows 20 to 36 are b's
    steps.judge.check("middle", 12, found[:1])
    steps.judge.check("long", 23, found[1:])
    rows([], a=long[40:41])
    steps.judge.check("long", 41, rows([0], a=long[41:42]))


def malformed_steps_are_refused(steps: Steps) -> None:
    steps.feed(a=("long", 20))
    stepper = steps.stepper
    good = stepper.step_of(a=SEQUENCES["long"][20:24])
    for fault in _faults(good):
        with pytest.raises(StepError):
            stepper.executor.step(fault)
    # Nothing has run: what the faulty steps named was not written.
    steps.judge.check("long", 20, stepper.executor.step(good))
    steps.feed(a=("long", 30))


def _faults(step: StepInput) -> Iterator[StepInput]:
    def changed(**arrays: Any) -> StepInput:
        return dataclasses.replace(step, **{k: np.asarray(v, np.int32) for k, v in arrays.items()})

    yield changed(tokens=step.tokens + 10_000)
    yield changed(positions=step.positions + 1)
    yield changed(seq_starts=[0, 3])
    yield changed(context_lens=step.context_lens - 22)
    yield changed(logit_rows=[4])
    yield changed(page_tables=np.full_like(step.page_tables, PAGES))
    yield changed(page_tables=step.page_tables[:, :, :1])
    yield dataclasses.replace(step, tokens=step.tokens.astype(np.int64))


SCENARIOS = [
    whole_prompts,
    chunks_at_an_offset,
    decoding,
    unequal_prompts_in_one_step,
    a_mixed_batch_of_five,
    proposals_that_are_taken_back,
    copied_pages_that_diverge,
    few_rows_or_none,
    malformed_steps_are_refused,
]


def play(case: Case, scenarios: Sequence[Callable[[Steps], None]]) -> Judge:
    program, _, recipe = programs(case.settings)
    assert program.stage == Stage.FINAL
    executor: Any = BACKENDS[case.backend](program, recipe)
    judge = Judge(case)
    try:
        for scenario in scenarios:
            scenario(Steps(executor, judge))
        judge.conclude(case.tips)
    finally:
        executor.close()
    return judge


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_architecture_in_a_mixed_batch(case: Case) -> None:
    assert len(play(case, [a_mixed_batch_of_five]).worst) == 104 + 38


@pytest.mark.parametrize("case", SOME, ids=str)
def test_every_scenario(case: Case) -> None:
    play(case, SCENARIOS)
