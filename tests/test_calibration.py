"""Calibration data from files and from the model itself, every fault of a file, and what the manifest says of it."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile

import numpy as np
import pytest
import torch

from enginewright import build as build_module
from enginewright.backends.artifact import open_engine
from enginewright.build import optimize
from enginewright.calibration import from_file, from_model, read_texts
from enginewright.passes.capture import capture
from enginewright.passes.source import open_source
from enginewright.passes.walk import Walk
from enginewright.recipes.errors import InputError
from enginewright.recipes.recipe import Calibration, load_recipe
from tests import models
from tests.passes.architectures import ARCHITECTURES, VOCAB, folder, write_tokenizer
from tests.passes.test_calibrated import a_full_disk

WORDS = " ".join(f"w{3 + i * 7 % (VOCAB - 3)}" for i in range(400))


def recipe_for(path, *overrides, recipe="int4-gptq"):
    return load_recipe(recipe, [f"calibration.source={path}", "calibration.length=32", *overrides])


def samples_of(path, *overrides, model=None):
    return from_file(open_source(model or folder("llama")), recipe_for(path, *overrides))


def text_file(tmp_path, text=WORDS, name="data.txt"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


# Files.


def test_a_text_is_cut_into_samples(tmp_path):
    tokens = [3 + i * 7 % (VOCAB - 3) for i in range(400)]
    got = samples_of(text_file(tmp_path))
    assert got.sequences == [tokens[start : start + 32] for start in range(0, 400, 32)]
    assert (got.source, got.tokens, got.seed) == ("data.txt", 400, 0)


def records(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [{"text": f"w{10 + i} " * (i + 1), "title": "a"} for i in range(50)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_records_are_samples_each_cut_to_the_length(tmp_path):
    got = samples_of(records(tmp_path), "calibration.samples=100")
    assert got.sequences == [[10 + i] * min(i + 1, 32) for i in range(1, 50)]
    assert got.provenance()["too_short"] == 1 and got.provenance()["text_field"] == "text"


def test_the_seed_chooses(tmp_path):
    """Among all samples, in the file's order; the same seed the same ones."""
    path = records(tmp_path)

    def chosen(seed):
        return samples_of(path, "calibration.samples=12", f"calibration.seed={seed}")

    first, again, other = chosen(1), chosen(1), chosen(2)
    assert first.sequences == again.sequences and first.provenance() == again.provenance()
    assert first.sequences != other.sequences
    assert first.provenance()["sha256"] != other.provenance()["sha256"]
    for got in (first, other):
        ids = [sequence[0] for sequence in got.sequences]
        assert len(ids) == 12 and ids == sorted(set(ids))
        assert max(ids) > 30, "not the first twelve"


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = ["w5 w6 w7", None, "w8 w9"]
    plain = arrow.array(texts)
    for column in (plain, plain.cast(arrow.large_string()), plain.dictionary_encode()):
        path = tmp_path / "data.parquet"
        table = arrow.table({"number": [1, 2, 3], "lists": [texts[:1]] * 3, "text": column})
        parquet.write_table(table, path)
        assert samples_of(path).sequences == [[5, 6, 7], [8, 9]]
        for field in ("number", "lists"):
            with pytest.raises(InputError, match=rf"(?s)no text in the field '{field}'.*text_field=text"):
                read_texts(path, field)
    (tmp_path / "bad.parquet").write_text("not a table")
    with pytest.raises(InputError, match="cannot be read"):
        read_texts(tmp_path / "bad.parquet", "text")


def test_a_tokenizer_that_begins_texts_begins_samples(tmp_path):
    from tokenizers import processors

    model = tmp_path / "model"
    shutil.copytree(folder("llama"), model)
    config = json.loads((model / "tokenizer.json").read_text())
    post = processors.TemplateProcessing("<bos> $A", "<bos> $A $B", [("<bos>", 1)])
    config["post_processor"] = json.loads(post.__getstate__())
    (model / "tokenizer.json").write_text(json.dumps(config))
    got = samples_of(text_file(tmp_path), model=model)
    assert all(sequence[0] == 1 and 1 not in sequence[1:] for sequence in got.sequences)
    assert [len(s) for s in got.sequences] == [32] * 12 + [29]  # 400 words, 31 a sample
    assert samples_of(text_file(tmp_path)).sequences[0][0] != 1


def test_no_sample_is_longer_than_the_context(tmp_path):
    """The tiny models have 256 positions."""
    path = text_file(tmp_path)
    assert [len(s) for s in samples_of(path, "calibration.length=512").sequences] == [256, 144]
    short = samples_of(path, "calibration.length=512", "max_context=100")
    assert {len(s) for s in short.sequences} == {100}


def test_json_strings_may_hold_any_line_separator(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [{"text": "w5\u2028w6\x85w7"}, {"text": "w8 w9"}]
    path.write_text(
        "\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    assert read_texts(path, "text") == [line["text"] for line in lines]


BAD = {
    "missing": (None, None, ["no calibration file", ".jsonl"]),
    "empty": ("data.txt", "", ["holds no text"]),
    "blank": ("data.jsonl", '{"text": "  "}\n', ["holds no text"]),
    "suffix": ("data.csv", "a,b", ["a form that is not read", ".csv", ".txt, .jsonl, .parquet"]),
    "no suffix": ("data", "w5 w6", ["no suffix"]),
    "broken": ("data.jsonl", '{"text": "w5 w6"}\n{"text": "w5\n', ["line 2 of", "not JSON", '{"text": "w5']),
    "brackets": ("data.jsonl", "[" * 100_000, ["line 1 of", "not JSON"]),
    "surrogate": ("data.jsonl", '{"text": "w5"}\n{"text": "w5 \\ud83d w6"}', ["line 2 of", "surrogate", "w5 "]),
    "array": ("data.jsonl", '["w5 w6"]', ["line 1 of", "no text in the field 'text'", "found: list"]),
    "field": ("data.jsonl", '{"texts": "w5 w6", "id": 3, "b": "x"}', ["'text'", "texts, b", "text_field=texts"]),
    "kind": ("data.jsonl", '{"text": 5}', ["no text in the field 'text'"]),
    "short": ("data.txt", "w5", ["too short", "1 tokens", "at least 2 tokens"]),
    "short records": ("data.jsonl", '{"text": "w5"}\n{"text": "w6"}', ["too short", "2 tokens, no sample"]),
    "bytes": ("data.txt", b"w5 \xff\xfe w6", ["cannot be read", "utf-8"]),
    "bytes in json": ("data.jsonl", b'{"text": "\xff"}', ["cannot be read", "utf-8"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_every_fault_of_a_file_is_told_before_the_model_is_captured(case, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "capture", lambda *a, **k: pytest.fail("captured"))
    name, content, words = BAD[case]
    path = tmp_path / (name or "nowhere.txt")
    if isinstance(content, str):
        content = content.encode()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        optimize(folder("llama"), "int4-gptq", tmp_path / "engine", calibration=path)
    for word in [*words, path.name if name else "nowhere.txt"]:
        assert word in str(raised.value), str(raised.value)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    "recipe, overrides, words",
    [
        ("int4", [], ["no use for calibration data", "recipe int4", "int4-gptq"]),
        ("int4-gptq", ["calibration.length=1"], ["too short", "calibration.length 1"]),
    ],
)
def test_a_recipe_that_cannot_use_it_says_so_before_the_model_is_opened(
    recipe, overrides, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(build_module, "open_source", lambda *a: pytest.fail("opened"))
    with pytest.raises(InputError) as raised:
        optimize("anything", recipe, calibration=text_file(tmp_path), overrides=overrides)
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    "recipe, overrides, backend, words",
    [
        ("int4-gptq", ["overrides+={match: '*.down_prj', weight: int8}"], "cpu", ["'*.down_prj'"]),
        ("int8", ["overrides+={match: lm_head, weight: int8, activation: int8_static}"], "cpu", ["lm_head"]),
        ("auto", ["mixed.budget=2"], "cpu", ["mixed.budget 2 bits"]),
        ("auto", ["overrides+={match: '*', weight: int8}"], "cpu", ["no linear to choose"]),
        ("keep", ["kv_cache.format=int8", "kv_cache.max_error=0.1"], "cpu", ["this checkpoint holds none"]),
        (
            "int4-awq-gptq",
            ["linear.weight=int4_g32_zp", "embedding.weight=bf16", "head.weight=bf16"],
            "checkpoint",
            ["short last group of 8"],
        ),
    ],
)
@pytest.mark.parametrize("source", ["self", "file"])
def test_what_a_model_cannot_have_is_told_before_it_calibrates(
    recipe, overrides, backend, words, source, tmp_path, monkeypatch
):
    """Before it writes samples, and before anything looks at those of a file."""
    if backend == "checkpoint":
        pytest.importorskip("compressed_tensors")
    monkeypatch.setattr(build_module, "from_model", lambda *a, **k: pytest.fail("samples were written"))
    monkeypatch.setattr(Walk, "run", lambda *a, **k: pytest.fail("samples were looked at"))
    given = "self" if source == "self" else text_file(tmp_path)
    with pytest.raises(InputError) as raised:
        optimize(
            folder("llama"), recipe, tmp_path / "e", backend=backend, overrides=overrides, calibration=given
        )
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_a_model_without_a_tokenizer_or_with_anothers(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "capture", lambda *a, **k: pytest.fail("captured"))
    bare = tmp_path / "bare"
    ARCHITECTURES["llama"]().save_pretrained(bare)
    with pytest.raises(InputError, match=r"(?s)no tokenizer.*calibration.source=self"):
        optimize(bare, "int4-gptq", tmp_path / "e", calibration=text_file(tmp_path))
    small = tmp_path / "small"
    ARCHITECTURES["llama"](vocab_size=100).save_pretrained(small)
    write_tokenizer(small)
    with pytest.raises(InputError, match=r"(?s)token 130.*ids below 100"):
        optimize(small, "int4-gptq", tmp_path / "e", calibration=text_file(tmp_path))


def test_a_name_that_no_file_can_have():
    with pytest.raises(InputError, match="no calibration file"):
        samples_of(f"{'a' * 300}.txt")


# The model's own text.


@pytest.fixture(scope="module")
def smollm2():
    source = open_source(models.smollm2())
    return source, capture(source)


@pytest.mark.slow
def test_a_model_writes_the_same_samples_every_time(smollm2):
    options = Calibration(samples=3, length=32, seed=5)
    first, second = (from_model(*smollm2, options, lambda text: None) for _ in range(2))
    assert first.sequences == second.sequences and first.provenance() == second.provenance()
    assert [len(sequence) for sequence in first.sequences] == [32] * 3
    assert len({tuple(sequence) for sequence in first.sequences}) == 3
    assert (first.source, first.seed, first.tokens) == ("self", 5, 96)
    specials = set(smollm2[0].tokenizer.all_special_ids)
    assert not specials & {sequence[0] for sequence in first.sequences}


def tiny(arch="llama", **options):
    source = open_source(folder(arch))
    return from_model(source, capture(source), Calibration(**options), lambda text: None)


def test_other_seeds_write_other_text_of_any_length():
    one, other = tiny(samples=70, length=9, seed=1), tiny(samples=70, length=9, seed=2)
    assert {len(s) for s in one.sequences} == {9} and len(one.sequences) == 70
    assert one.sequences != other.sequences
    assert len({s[0] for s in one.sequences}) < 70, "some begin alike"
    assert len(set(map(tuple, one.sequences))) == 70, "and go on differently"
    assert {len(s) for s in tiny(samples=2, length=2).sequences} == {2}
    assert {len(s) for s in tiny(samples=2, length=1000).sequences} == {256}  # the context


def test_a_disk_without_room_for_the_engine_that_writes_is_told(tmp_path, monkeypatch):
    source = open_source(folder("llama"))
    program = capture(source)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with a_full_disk(1000), pytest.raises(InputError, match=r"(?s)cannot be written.*MiB free.*TMPDIR"):
        from_model(source, program, Calibration(), lambda text: None)
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_what_the_model_finds_likely():
    """Continuations, not noise: the model's own probabilities of them lie far above those of random tokens."""
    source = open_source(folder("llama"))
    program = capture(source)
    samples = from_model(source, program, Calibration(samples=8, length=20), lambda text: None)

    def likelihood(sequences):
        total = []
        for tokens in sequences:
            log = program.run(tokens).log_softmax(-1)
            total.append(log[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).mean())
        return float(torch.stack(total).mean())

    random = np.random.default_rng(0).integers(3, VOCAB, (8, 20)).tolist()
    assert likelihood(samples.sequences) > likelihood(random) + 0.5


# The manifest.


OPTIONS = ("kv_cache.format=int8", "kv_cache.max_error=0.5", "calibration.length=24", "calibration.samples=6")


def built(model, out, recipe, *overrides, **options):
    return optimize(
        model, recipe, out, overrides=[*OPTIONS, *overrides], allow_unverified=True, **options
    ).path


def test_the_manifest_says_what_calibration_saw_and_did(tmp_path):
    path = text_file(tmp_path, name="some text.txt")
    engine = built(folder("mixtral"), tmp_path / "e", "int4-awq-gptq", "smooth.grid=2", calibration=path)
    section = open_engine(engine, check=True).manifest["calibration"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sequences = samples_of(
        path, "calibration.length=24", "calibration.samples=6", model=folder("mixtral")
    ).sequences
    tokens = hashlib.sha256()
    for sequence in sequences:
        tokens.update(len(sequence).to_bytes(8, "little") + np.asarray(sequence, "<i4").tobytes())
    known = {
        "source": "some text.txt",
        "file_sha256": digest,
        "sha256": tokens.hexdigest(),
        "samples": 6,
        "tokens": sum(map(len, sequences)),
        "seed": 0,
    }
    assert section.items() >= known.items()
    smooth, quantise, gate = (section[name] for name in ("smooth", "quantise", "gate_kv"))
    assert smooth["scaled"] + len(smooth["left_at_default"]) == 7
    assert quantise["fallbacks"] == {} and quantise["rounded"] == 2 * 4 + 2
    few = quantise["experts_with_few_tokens"]
    assert few and all(0 <= count < 32 and ".experts." in name for name, count in few.items())
    assert len(quantise["relative_errors"]) == 2 * 4
    assert set(gate["kv_errors"]) == {"0", "1"}


def test_equal_builds_give_equal_bytes_and_no_path(tmp_path):
    """Of one text in two places; nothing in an engine says where it or its model lay."""
    engines = []
    for name in ("one", "two"):
        place = tmp_path / name
        place.mkdir()
        path = text_file(place)
        engines.append(built(folder("llama"), place / "engine", "int4-gptq", calibration=path))
    manifests = [(engine / "engine.json").read_bytes() for engine in engines]
    assert manifests[0] == manifests[1]
    for file in ("program.json", "weights.bin"):
        assert (engines[0] / file).read_bytes() == (engines[1] / file).read_bytes()
    assert (
        str(tmp_path).encode() not in manifests[0]
        and str(folder("llama").parent).encode() not in manifests[0]
    )
    assert json.loads(manifests[0])["recipe"]["calibration"]["source"] == "data.txt"


def test_the_models_own_text_builds_equal_engines(tmp_path):
    engines = [
        built(folder("gpt2"), tmp_path / name, "llm-int8", "outliers.threshold=2") for name in ("a", "b")
    ]
    manifests = [(engine / "engine.json").read_bytes() for engine in engines]
    assert manifests[0] == manifests[1]
    section = json.loads(manifests[0])["calibration"]
    assert (section["source"], section["samples"], section["tokens"]) == ("self", 6, 144)
    assert section["quantise"]["outlier_columns"] > 0


def test_recipes_without_calibration_have_no_such_section(tmp_path):
    engine = optimize(folder("llama"), "int4", tmp_path / "e", allow_unverified=True).path
    assert "calibration" not in open_engine(engine).manifest
