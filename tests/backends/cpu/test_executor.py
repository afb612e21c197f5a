"""The executor against numpy, against itself in other batches, chunks and threads, and damaged programs."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginewright.backends import get_backend
from enginewright.backends.base import StepError, StepInput, StepLimits, check_step
from enginewright.backends.cpu import _native
from enginewright.backends.cpu.executor import CpuExecutor
from enginewright.recipes.errors import ArtifactError, InputError
from tests.backends.cpu.interpreter import Interpreter
from tests.backends.cpu.small_programs import Pages, SmallProgram, model, step_input

PAGES = 96
TEXT = [int(i) for i in np.random.default_rng(7).integers(0, 50, 300)]


def alone(executor: CpuExecutor, tokens: list[int], chunks: list[int], seed: int = 0) -> np.ndarray:
    """Logits of every token of one sequence, given in chunks of these sizes (the last one repeats)."""
    pages = Pages([g.page_size for g in executor.kv_groups], PAGES, seed)
    done, out = 0, []
    while done < len(tokens):
        count = min(chunks[min(len(out), len(chunks) - 1)], len(tokens) - done)
        out.append(executor.step(step_input(pages, [(0, done, tokens[done : done + count])])))
        done += count
    return np.concatenate(out)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


# ---- against numpy -------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("experts", [0, 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_model_agrees_with_numpy(tmp_path: Path, isa: str, experts: int, threads: int) -> None:
    program = model("f32", experts=experts)
    executor = program.load(tmp_path, PAGES, threads=threads, isa=isa)
    for count in (1, 5, 90):
        want = Interpreter(tmp_path).run(TEXT[:count])
        got = alone(executor, TEXT[:count], [count])
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * np.abs(want).max())
    assert executor.threads == threads and executor.isa == isa


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize(
    ("format", "rounding"),
    [
        *(
            (format, {})
            for format in ("bf16", "fp8", "int8", "int8_g16", "uint8_g64", "int4_g32", "int4_g64_zp")
        ),
        *((format, {}) for format in ("int3_g16", "int3_zp", "int2_g256", "int4_g256")),
        *((format, {"activation": "int8"}) for format in ("int8", "int4_g32_zp", "uint8")),
        *((format, {"activation": "int8_static"}) for format in ("int8", "int2_g32")),
        ("int8", {"outliers": 3}),
        ("int8", {"outliers": 4, "activation": "int8"}),
    ],
)
def test_rounded_formats_stay_near(tmp_path: Path, isa: str, format: str, rounding: dict[str, Any]) -> None:
    executor = model(format, experts=0 if rounding else 3, **rounding).load(
        tmp_path, PAGES, threads=2, isa=isa
    )
    want = Interpreter(tmp_path).run(TEXT[:70])
    got = alone(executor, TEXT[:70], [70])
    # A token whose routing differs by rounding may differ wholly, and so may a code at a tie: most must not.
    distance = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(distance) < 0.01 and (distance < 0.1).mean() > 0.8


def test_inner_linears_rope_and_the_other_row_ops(tmp_path: Path) -> None:
    p = SmallProgram(10)
    x, y, z, g = p.value(36), p.value(15), p.value(15), p.value(15)
    p.emit("embedding", [], [x], [p.table(p.rng.normal(size=(10, 36)))], index="tokens")
    angles = np.arange(64)[:, None] * np.array([0.1, 0.01])
    p.emit(
        "rope",
        [x],
        [x],
        [p.table(np.cos(angles)), p.table(np.sin(angles))],
        heads=3,
        head_dim=12,
        rotary_dim=4,
        interleaved=True,
    )
    p.emit("linear", [x], [y], [p.linear("f32", 5, 12), p.vector(p.rng.normal(size=5))], inner=3)
    p.emit("activation", [y], [z], activation="gelu_tanh")
    p.emit("gated_activation", [z, y], [g], activation="swiglu_oai", alpha=1.5, limit=0.7)
    index, more, out = p.value(1, "i32"), p.value(10), p.value(10, rows="logits")
    p.emit(
        "elementwise",
        [{"input": "tokens"}, {"scalar": 1}],
        [index],
        kind="bitwise_xor",
        shape=[1],
        strides=[[1], [], [1]],
    )
    p.emit("embedding", [index], [more], [p.table(p.rng.normal(size=(12, 10)))], index="value")
    mixed = p.value(10)
    p.emit(
        "elementwise",
        [{**g, "column": 2, "width": 10}, more],
        [mixed],
        kind="mul",
        shape=[10],
        strides=[[1]] * 3,
    )
    p.emit("select_rows", [mixed], [out])
    p.finish(out)
    for threads in (1, 3):
        executor = p.load(tmp_path, threads=threads)
        for rows in ([4], [0, 2, 4, 1]):
            step = step_input(Pages([], 0), [(0, 0, [3, 1, 4, 1, 5])], rows)
            np.testing.assert_allclose(
                executor.step(step), Interpreter(tmp_path).run([3, 1, 4, 1, 5], rows), rtol=1e-5, atol=1e-6
            )


# ---- one answer ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[CpuExecutor]]]:
    """The same programs on 1, 2 and 8 threads."""
    made = {}
    for name, program in {
        "float": model("f32", experts=4),
        "int4": model("int4_g32", kv_format="bf16"),
        "int8 experts": model("int8", kv_format="bf16", experts=6),
        "int8 cache": model("bf16", kv_format="int8"),
        "mixed cache": model("f32", kv_format="int8", layer_formats=("int8", "f32", "bf16", "int8")),
    }.items():
        folder = tmp_path_factory.mktemp("program")
        made[name] = [program.load(folder, PAGES, threads=threads, max_tokens=300) for threads in (1, 2, 8)]
    yield made
    for executors in made.values():
        for executor in executors:
            executor.close()


@pytest.mark.parametrize("name", ["float", "int4", "int8 experts", "int8 cache", "mixed cache"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_batch_chunks_and_threads_change_no_bit(
    engines: dict[str, list[CpuExecutor]], name: str, data: st.DataObject
) -> None:
    one, two, eight = engines[name]
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6), label="lengths")
    texts = [TEXT[7 * i : 7 * i + n] for i, n in enumerate(lengths)]
    want = [alone(one, text, [len(text)]) for text in texts]
    executor = data.draw(st.sampled_from([one, two, eight]), label="executor")
    executor.fill_pool(data.draw(st.sampled_from([0.0, float("nan"), 1e30]), label="poison"))
    pages = Pages([g.page_size for g in executor.kv_groups], PAGES, 3)
    done = [0] * len(texts)
    while any(d < len(text) for d, text in zip(done, texts, strict=True)):
        work = []
        for s, text in enumerate(texts):
            count = data.draw(st.integers(0, len(text) - done[s]), label=f"rows of {s}")
            if count:
                work.append((s, done[s], text[done[s] : done[s] + count]))
        if not work:
            s = next(s for s, text in enumerate(texts) if done[s] < len(text))
            work = [(s, done[s], texts[s][done[s] :])]
        logits, row = executor.step(step_input(pages, work)), 0
        for s, cached, new in work:
            assert same(logits[row : row + len(new)], want[s][cached : cached + len(new)])
            row += len(new)
            done[s] += len(new)


@pytest.mark.parametrize("name", ["float", "int4", "int8 cache", "mixed cache"])
def test_long_contexts_that_are_divided_by_spans_change_no_bit(
    engines: dict[str, list[CpuExecutor]], name: str
) -> None:
    one, two, eight = engines[name]
    text = (TEXT * 5)[:1300]
    want = [alone(executor, text, [300]) for executor in (one, two, eight)]
    assert same(want[0], want[1]) and same(want[0], want[2])
    for executor in (one, two, eight):
        assert same(
            alone(executor, text, [300, 300, 300, 300, 1]), want[0]
        )  # 100 decodes beyond position 1200


@pytest.mark.parametrize("name", ["int4", "int8 cache", "mixed cache"])
def test_copied_pages_continue_a_sequence(engines: dict[str, list[CpuExecutor]], name: str) -> None:
    executor = engines[name][1]
    want = alone(executor, TEXT[:50], [50])
    pages = Pages([g.page_size for g in executor.kv_groups], PAGES)
    executor.step(step_input(pages, [(0, 0, TEXT[:40])]))
    other = [list(table) for table in pages.table(1, 40)]
    for group, (sources, targets) in enumerate(zip(pages.table(0, 40), other, strict=True)):
        executor.copy_pages(group, sources, targets)
    assert same(executor.step(step_input(pages, [(1, 40, TEXT[40:50])])), want[40:])
    with pytest.raises(StepError, match="page 96"):
        executor.copy_pages(0, [PAGES], [0])
    with pytest.raises(StepError, match="KV group 2"):
        executor.copy_pages(2, [0], [0])


def test_layers_of_unlike_formats_take_the_memory_of_their_own(
    engines: dict[str, list[CpuExecutor]],
) -> None:
    """2 heads of 16 + 8 features (values padded to 16) a token; int8 has 4 bytes of scale for each vector."""
    token = {"f32": 2 * 32 * 4, "bf16": 2 * 32 * 2, "int8": 2 * (32 + 8)}
    whole = {name: engines[name][0].kv_groups for name in ("float", "int4", "int8 cache")}
    for name, kv_format in (("float", "f32"), ("int4", "bf16"), ("int8 cache", "int8")):
        assert [g.format for g in whole[name]] == [kv_format] * 2
        assert [g.page_bytes for g in whole[name]] == [16 * token[kv_format], 32 * token[kv_format]]
    executor = engines["mixed cache"][0]
    (group,) = executor.kv_groups
    assert (group.format, group.layers) == ("int8", 4)
    assert group.page_bytes == 16 * (2 * token["int8"] + token["f32"] + token["bf16"])
    assert executor.memory()["pool"] >= PAGES * group.page_bytes


def test_an_int8_cache_costs_little(tmp_path: Path) -> None:
    """The same weights with other caches: the rounding shows, and is small."""
    exact, rounded = (
        alone(model("f32", kv_format=kv_format).load(tmp_path, PAGES, threads=1), TEXT[:90], [90])
        for kv_format in ("f32", "int8")
    )
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.05


def test_an_unknown_format_of_a_layer_is_refused(tmp_path: Path) -> None:
    program = model("f32")
    program.document["kv_groups"][1]["layers"][0]["format"] = "fp4"
    with pytest.raises(
        ArtifactError, match="KV group 1, layer 0: unknown format 'fp4'; known: f32, bf16, int8"
    ):
        program.load(tmp_path)


def test_windows_do_not_need_the_pages_they_have_passed(engines: dict[str, list[CpuExecutor]]) -> None:
    executor = engines["float"][1]
    want = alone(executor, TEXT[:100], [100])
    executor.fill_pool(float("nan"))
    pages = Pages([16, 32], PAGES)
    executor.step(step_input(pages, [(0, 0, TEXT[:90])]))
    step = step_input(pages, [(0, 90, TEXT[90:100])])
    step.page_tables[1, 0, :2] = -1  # window 20: positions below 71 are passed
    assert same(executor.step(step), want[90:])
    step.page_tables[1, 0, 2] = -1
    with pytest.raises(StepError, match="KV group 1: page -1"):
        executor.step(step)


def test_copied_weights_give_the_same_bits(tmp_path: Path) -> None:
    program = model("int4_g64")
    mapped, copied = (program.load(tmp_path, PAGES, threads=2, weights=mode) for mode in ("mmap", "copy"))
    assert same(alone(mapped, TEXT[:20], [20]), alone(copied, TEXT[:20], [20]))
    assert set(mapped.memory()) == {"weights", "pool", "arena", "scratch"}
    assert mapped.memory()["weights"] == (tmp_path / "weights.bin").stat().st_size
    assert mapped.memory()["pool"] >= sum(PAGES * g.page_bytes for g in mapped.kv_groups)


# ---- what is refused -----------------------------------------------------------------------------


def limits(executor: CpuExecutor, pages: int = PAGES) -> StepLimits:
    groups = executor.kv_groups
    return StepLimits(
        executor.max_tokens, executor.max_rows, 50, executor.max_positions, groups, [pages] * len(groups)
    )


def changed(**arrays: Any) -> Any:
    def change(step: StepInput) -> StepInput:
        fields = {name: getattr(step, name) for name in StepInput.__slots__}
        return StepInput(
            **{**fields, **{k: v if callable(v) is False else v(fields[k]) for k, v in arrays.items()}}
        )

    return change


def at(index: Any, value: int) -> Any:
    def put(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return put


BAD_STEPS = {
    "token too large": changed(tokens=at(3, 50)),
    "token negative": changed(tokens=at(0, -1)),
    "position off by one": changed(positions=at(4, 7)),
    "position negative": changed(positions=at(0, -1)),
    "context shorter than its rows": changed(context_lens=at(0, 2)),
    "context beyond the tables": changed(
        context_lens=at(1, 5000), positions=lambda a: a + np.array([0] * 6 + [4991] * 4, np.int32)
    ),
    "starts descend": changed(seq_starts=at(1, 11)),
    "starts do not end at T": changed(seq_starts=at(2, 9)),
    "empty sequence": changed(seq_starts=at(1, 0)),
    "logit row outside": changed(logit_rows=at(0, 10)),
    "page outside": changed(page_tables=at((0, 0, 0), PAGES)),
    "page missing": changed(page_tables=at((1, 1, 0), -1)),
    "page shared": changed(page_tables=lambda a: np.ascontiguousarray(np.broadcast_to(a[:, :1], a.shape))),
    "a group too few": changed(page_tables=lambda a: a[:1].copy()),
    "wrong dtype": changed(tokens=lambda a: a.astype(np.int64)),
    "not contiguous": changed(positions=lambda a: np.repeat(a, 2)[::2]),
    "lengths differ": changed(positions=lambda a: a[:-1].copy()),
}


@pytest.mark.parametrize("fault", BAD_STEPS)
def test_malformed_steps_are_refused_by_the_check_and_by_the_executor(
    engines: dict[str, list[CpuExecutor]], fault: str
) -> None:
    executor = engines["float"][1]
    step = step_input(Pages([16, 32], PAGES), [(0, 0, TEXT[:6]), (1, 5, TEXT[:4])])
    check_step(step, limits(executor))
    bad = BAD_STEPS[fault](step)
    with pytest.raises(StepError):
        check_step(bad, limits(executor))
    with pytest.raises(StepError):
        executor.step(bad)


def test_no_pool_too_many_rows_and_a_closed_engine(tmp_path: Path) -> None:
    program = model()
    program.write(tmp_path)
    executor = CpuExecutor(
        tmp_path / "program.json", tmp_path / "weights.bin", threads=2, max_tokens=8, max_rows=2
    )
    step = step_input(Pages([16, 32], 8), [(0, 0, TEXT[:6])], [5])
    with pytest.raises(StepError, match="create_pool"):
        executor.step(step)
    executor.create_pool([8, 8])
    assert executor.step(step).shape == (1, 50)
    assert executor.step(step_input(Pages([16, 32], 8), [(0, 0, TEXT[:6])], [])).shape == (0, 50)
    with pytest.raises(StepError, match="1 to 8"):
        executor.step(step_input(Pages([16, 32], 8), [(0, 0, TEXT[:9])], [5]))
    with pytest.raises(StepError, match="at most 2"):
        executor.step(step_input(Pages([16, 32], 8), [(0, 0, TEXT[:6])]))
    for pages in ([8], [0, 8], [8, 8, 8]):
        with pytest.raises(StepError):
            executor.create_pool(pages)
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.step(step)


def test_options_are_checked(tmp_path: Path) -> None:
    program = model()
    for options in (
        {"threads": 0},
        {"weights": "disk"},
        {"max_tokens": 0},
        {"max_rows": 1 << 21},
        {"isa": "vax"},
    ):
        with pytest.raises(InputError):
            program.load(tmp_path, **options)
    with pytest.raises(ArtifactError):
        CpuExecutor(tmp_path / "program.json", tmp_path / "missing.bin")
    with pytest.raises(InputError, match="cpu"):
        get_backend("cpy")
    assert get_backend("cpu").exact


def test_an_expert_or_row_that_does_not_exist_fails_the_step_alone(tmp_path: Path) -> None:
    p = SmallProgram(8)
    x, index, weight, y, out = (
        p.value(8),
        p.value(1, "i32"),
        p.value(1),
        p.value(8),
        p.value(8, rows="logits"),
    )
    p.emit("embedding", [], [x], [p.table(p.rng.normal(size=(8, 8)))], index="tokens")
    p.emit("copy", [{"input": "tokens"}], [index], shape=[1], strides=[[1], [1]])
    p.emit("copy", [{"scalar": 1.0}], [weight], shape=[1], strides=[[], [1]])
    p.emit(
        "moe",
        [x, index, weight],
        [y],
        [p.gated("f32", 8, 8, 3), -1, p.linear("f32", 8, 8, 3), -1],
        activation="silu",
        experts=3,
        top_k=1,
    )
    p.emit("select_rows", [y], [out])
    p.finish(out)
    executor = p.load(tmp_path, threads=2)
    good = step_input(Pages([], 0), [(0, 0, [0, 2, 1])])
    want = executor.step(good)
    with pytest.raises(RuntimeError, match=r"moe of test\.moe: .*expert"):
        executor.step(step_input(Pages([], 0), [(0, 0, [0, 7, 1])]))
    assert same(executor.step(good), want)


# ---- damaged programs ----------------------------------------------------------------------------


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from leaves(child, (*path, key))


DAMAGED = [model("int4_g32", experts=3), model("int8", outliers=3, activation="int8_static", windows=(0,))]
PLACES = [(index, place) for index in (0, 1) for place in sorted(leaves(DAMAGED[index].document), key=str)]
JUNK = [
    None,
    -1,
    0,
    1,
    3,
    17,
    1 << 20,
    1 << 40,
    1e300,
    -1e300,
    0.5,
    "",
    "f32",
    "int8",
    "int3_g256_zp",
    "linear",
    [],
    {},
    [0],
    True,
    float("nan"),
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PLACES), junk=st.sampled_from(JUNK), remove=st.booleans())
def test_damage_anywhere_is_refused_or_harmless(
    tmp_path: Path, place: tuple[int, tuple[Any, ...]], junk: Any, remove: bool
) -> None:
    damaged, place = DAMAGED[place[0]], place[1]
    document = copy.deepcopy(damaged.document)
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    if remove:
        del parent[place[-1]]
    else:
        parent[place[-1]] = junk
    damaged.write(tmp_path)
    (tmp_path / "program.json").write_text(json.dumps(document))
    try:
        executor = CpuExecutor(tmp_path / "program.json", tmp_path / "weights.bin", threads=2, max_tokens=16)
        executor.create_pool([4] * len(document["kv_groups"]))
    except (ArtifactError, StepError, MemoryError):
        return
    try:  # what still loads must run without reading or writing outside its memory
        step = step_input(Pages([g.page_size for g in executor.kv_groups], 4), [(0, 0, TEXT[:9])])
        executor.step(step) if executor.vocab_size == 50 else None
    except (StepError, RuntimeError):
        pass
    executor.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int8_zp"}, "unknown format 'int8_zp'; known: f32"),
        ({"format": "int4_g48"}, "unknown format"),
        ({"format": "int4_g64"}, "only an int8 weight"),
        ({"activation": "int8_g64"}, "does not take the activation 'int8_g64'"),
        ({"activation": "int9"}, "does not take the activation 'int9'"),
        ({"activation": 8}, "'activation' must be a string"),
        ({"activation": "int8"}, "'activation_scale' belongs to the activation int8_static alone"),
        ({"activation_scale": 0}, "must be a finite number above 0"),
        ({"activation_scale": -0.5}, "must be a finite number above 0"),
        ({"activation_scale": float("inf")}, "must be a finite number above 0"),
        ({"activation_scale": float("nan")}, "must be a finite number above 0"),
        ({"activation_scale": 1e-60}, "must be a finite number above 0"),
        ({"activation_scale": None}, "'activation_scale' must be a number"),
        ({"columns": []}, "'columns' is empty"),
        ({"columns": [1, 2, 48]}, "'columns' must be a whole number from 3 to 47"),
        ({"columns": [3, 3, 4]}, "'columns' must be a whole number from 4 to 47"),
        ({"columns": [-1, 3, 4]}, "'columns' must be a whole number from 0 to 47"),
        ({"columns": [0.5, 3, 4]}, "'columns' must be a whole number"),
        ({"columns": [1, 2]}, "its shape and format need"),
        ({"columns": {"0": 1}}, "'columns' must be a list"),
        ({"experts": 2}, "no stack of experts"),
    ],
)
def test_damaged_formats_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    program = model("int8", outliers=3, activation="int8_static")
    entry = next(
        w for w in program.document["weights"] if "columns" in w and w["k"] == 48 and "gated" not in w
    )
    entry.update(change)
    with pytest.raises(ArtifactError, match=re.escape(message)):
        program.load(tmp_path)


@pytest.mark.parametrize("rounding", [{"outliers": 2}, {"activation": "int8_static"}])
def test_experts_and_lookups_refuse_what_they_cannot_do(tmp_path: Path, rounding: dict[str, Any]) -> None:
    p = SmallProgram(8)
    x, index, weight, y, out = (
        p.value(8), p.value(1, "i32"), p.value(1), p.value(8), p.value(8, rows="logits"),
    )  # fmt: skip
    table = p.linear("int8", 8, 8, **rounding)
    p.emit("embedding", [], [x], [table], index="tokens")
    p.emit("copy", [{"input": "tokens"}], [index], shape=[1], strides=[[1], [1]])
    p.emit("copy", [{"scalar": 1.0}], [weight], shape=[1], strides=[[], [1]])
    weights = [p.gated("int8", 8, 8, **rounding), -1, p.linear("int8", 8, 8), -1]
    p.emit("moe", [x, index, weight], [y], weights, activation="silu", experts=1, top_k=1)
    p.emit("select_rows", [y], [out])
    p.finish(out)
    if "outliers" in rounding:
        with pytest.raises(ArtifactError, match="the table keeps columns apart"):
            p.load(tmp_path)
        p.document["instructions"][0]["weights"] = [p.linear("int8", 8, 8)]
    with pytest.raises(ArtifactError, match="experts take neither columns kept apart nor"):
        p.load(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"version": 1', "nul", '{"version": 2}', "[" * 100, '{"a": "\\ud800"}', "1e", '"\\q"'],
)
def test_text_that_is_no_program_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "program.json").write_text(text)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match="program"):
        CpuExecutor(tmp_path / "program.json", tmp_path / "weights.bin")


def test_a_short_weights_file_is_refused(tmp_path: Path) -> None:
    model().write(tmp_path)
    data = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(data[:-64])
    with pytest.raises(ArtifactError, match="do not lie in the weights file"):
        CpuExecutor(tmp_path / "program.json", tmp_path / "weights.bin")
