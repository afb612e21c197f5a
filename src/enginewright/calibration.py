"""Calibration data: text from a file, or text that the model writes itself.

`self`, the default, needs no data set: the model's own bf16 engine continues random tokens at temperature 1, as in Liu et al.
2023, "LLM-QAT", §3.1. What it writes is what it finds likely, which is what its activations should be measured on.

A file is .txt (one text, cut into samples), .jsonl or .parquet (one text a record, each cut to the length). Which samples
are taken follows from the seed. Every fault of a file is found before any long work.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from enginewright.backends import get_backend
from enginewright.backends.artifact import Artifact
from enginewright.passes.calibration import Samples
from enginewright.passes.manager import Step, run_steps
from enginewright.passes.normalise import Normalise
from enginewright.passes.pipeline import steps
from enginewright.passes.program import Program, Stage
from enginewright.passes.source import ModelSource
from enginewright.passes.supported import resolve_context
from enginewright.passes.walk import no_room
from enginewright.recipes.errors import InputError, near_matches
from enginewright.recipes.recipe import Calibration, Recipe, load_recipe
from enginewright.runtime.engine import load

__all__ = ["check_calibration", "first_tokens", "from_file", "from_model", "read_texts"]

LEAST_TOKENS = 2  # a sample of one token has nothing to attend to
_MOST_RECORDS_SHOWN = 8
_TEXT_TYPES = ("string", "large_string", "string_view")  # of Arrow

Report = Callable[[str], None]
Texts = list[str]


def check_calibration(recipe: Recipe) -> None:
    """Refuse a calibration that could not work, before any model is opened."""
    options = recipe.calibration
    if not recipe.calibrates:
        if options.source != "self":
            raise InputError(
                "the recipe has no use for calibration data",
                found=f"calibration.source {options.source}, recipe {recipe.name}",
                expected="a recipe that calibrates, such as int4-awq or int4-gptq",
                action="leave --calibration out, or choose another recipe",
            )
    elif options.length < LEAST_TOKENS:
        raise InputError(
            "calibration samples are too short",
            found=f"calibration.length {options.length}",
            expected=f"at least {LEAST_TOKENS} tokens",
        )
    elif options.source != "self":
        read_texts(Path(options.source).expanduser(), options.text_field)


def read_texts(path: Path, text_field: str) -> Texts:
    """The texts of a calibration file. Raises InputError for a file that is missing, empty, or of another form."""
    if not _is_file(path):
        raise InputError(
            f"there is no calibration file {path}",
            expected="a .txt, .jsonl or .parquet file, or `self`",
            action="correct calibration.source (--calibration)",
        )
    readers = {".txt": _read_plain, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise InputError(
            f"the calibration file {path} has a form that is not read",
            found=path.suffix or "no suffix",
            expected=", ".join(readers),
        )
    texts = [text for text in readers[path.suffix](path, text_field) if text.strip()]
    if not texts:
        raise InputError(
            f"the calibration file {path} holds no text",
            found="it is empty, or every text in it is",
            action="give a file with text like that which the model will see",
        )
    return texts


def _is_file(path: Path) -> bool:
    """Whether there is such a file; not where the name is one that no file can have, or lies where nothing may be seen."""
    try:
        return path.is_file()
    except OSError:
        return False


def from_file(source: ModelSource, recipe: Recipe) -> Samples:
    """Samples of a file's text, as the model's tokenizer makes them; none is longer than the engine's context."""
    options = recipe.calibration
    path = Path(options.source).expanduser()
    texts = read_texts(path, options.text_field)
    if source.tokenizer is None:
        raise InputError(
            f"{path} cannot be turned into tokens: the model has no tokenizer",
            action="set calibration.source=self, or add the tokenizer's files to the model's folder",
        )
    first = first_tokens(source.tokenizer)
    whole = path.suffix == ".txt"
    sequences: list[list[int]] = []
    wanted = min(options.length, resolve_context(source.config, recipe.max_context)[0]) - len(first)
    if wanted < 1:
        raise InputError("calibration.length leaves no room for text", found=options.length)
    for text in texts:
        ids = source.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        stop = len(ids) if whole else wanted
        sequences += [first + ids[start : start + wanted] for start in range(0, min(len(ids), stop), wanted)]
    usable = [sequence for sequence in sequences if len(sequence) >= LEAST_TOKENS]
    if not usable:
        raise InputError(
            f"the calibration file {path} is too short",
            found=f"{sum(map(len, sequences))} tokens, no sample of {LEAST_TOKENS} or more",
            expected=f"text of at least {LEAST_TOKENS} tokens; {options.samples} × {options.length} are asked for",
        )
    _require_known(source, path, usable)
    detail: dict[str, Any] = {"file_sha256": _file_digest(path)}
    if not whole:
        detail["text_field"] = options.text_field
    if len(usable) < len(sequences):
        detail["too_short"] = len(sequences) - len(usable)
    return Samples(_chosen(usable, options), path.name, options.seed, detail)


def _require_known(source: ModelSource, path: Path, sequences: list[list[int]]) -> None:
    """Refuse text whose tokens the model has no embedding of: its tokenizer belongs to another model."""
    largest, size = max(map(max, sequences)), getattr(source.config, "vocab_size", None)
    if size is not None and largest >= size:
        raise InputError(
            f"the tokenizer makes tokens of {path} that the model does not have",
            found=f"token {largest}",
            expected=f"ids below {size}, the size of the model's vocabulary",
            action="check that the folder's tokenizer belongs to its model",
        )


def from_model(source: ModelSource, program: Program, options: Calibration, report: Report) -> Samples:
    """Samples that the model writes: its bf16 engine, built in a temporary folder from the captured `program`."""
    recipe = load_recipe("bf16")
    program = program.clone()
    with tempfile.TemporaryDirectory(prefix="enginewright-calibration-") as folder:
        report("building the bf16 engine that writes the samples")
        run_steps(program, [Step(Normalise(), Stage.NORMALISED, required=True), *steps(recipe)])
        backend = get_backend("cpu")
        try:
            files = backend.lower(program, recipe, Path(folder))
        except OSError as error:
            raise no_room(Path(folder), error) from error
        manifest = {
            "backend": "cpu",
            "target": backend.target,
            "model": {"max_context": program.facts.max_context, "vocab_size": program.facts.vocab_size},
            "kv_groups": [{"window": group.window} for group in program.facts.kv_groups],
            "files": {name: {} for name in files},
        }
        length = min(options.length, program.facts.max_context)
        with load(
            Artifact(Path(folder), manifest), cache_tokens=64 * (length + 32), max_sequences=64
        ) as engine:
            return Samples(list(_written(engine, source, length, options, report)), "self", options.seed)


def _written(
    engine: Any, source: ModelSource, length: int, options: Calibration, report: Report
) -> Iterator[list[int]]:
    tokenizer = source.tokenizer
    first = [] if tokenizer is None else first_tokens(tokenizer)
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    chance = random.Random(options.seed)
    starts: list[list[int]] = []
    while len(starts) < options.samples:
        token = chance.randrange(engine.vocab_size)
        if token not in special or len(special) >= engine.vocab_size:
            starts.append([*first, token])
    seeds = [chance.randrange(2**32) for _ in starts]
    missing = max(length - len(starts[0]), 0)
    wanted, written, told = missing * len(starts), 0, 0
    began = time.perf_counter()
    pieces: list[list[int]] = [list(start) for start in starts]
    for at in range(0, len(starts) if missing else 0, 64):
        group = slice(at, at + 64)
        for delta in engine.stream(
            starts[group], missing, temperature=1.0, seed=seeds[group], ignore_eos=True
        ):
            if delta.error is not None:
                raise delta.error
            pieces[at + delta.index] += delta.token_ids
            written += len(delta.token_ids)
            told += 1
            if told % 64 == 0:
                left = (time.perf_counter() - began) / written * (wanted - written)
                report(f"{written:,} of {wanted:,} tokens written by the model, {left:,.0f} s left")
    yield from pieces


def first_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: the beginning-of-sequence token, or nothing."""
    bos = tokenizer.bos_token_id
    ids = tokenizer("a")["input_ids"]
    return [bos] if bos is not None and ids[:1] == [bos] else []


def _chosen(sequences: list[list[int]], options: Calibration) -> list[list[int]]:
    """As many as are asked for, drawn by the seed, in the file's order."""
    if len(sequences) <= options.samples:
        return sequences
    picked = random.Random(options.seed).sample(range(len(sequences)), options.samples)
    return [sequences[index] for index in sorted(picked)]


def _file_digest(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _digest(file)
        )


def _digest(file: Any) -> str:
    import hashlib

    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"the calibration file {path} cannot be read", found=" ".join(str(error).split())[:200])


def _read_plain(path: Path, _field: str) -> Texts:
    try:
        return [path.read_text(encoding="utf-8-sig")]
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _read_jsonl(path: Path, text_field: str) -> Texts:
    texts = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON's strings may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # the latter for brackets in brackets without end
            raise InputError(f"line {number} of {path} is not JSON", found=line[:80]) from error
        texts.append(_text_of(record, text_field, f"line {number} of {path}"))
    return texts


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        fields = (
            [key for key, value in record.items() if isinstance(value, str)]
            if isinstance(record, dict)
            else []
        )
        near = near_matches(text_field, fields, 1) or fields[:1]
        raise InputError(
            f"{where} has no text in the field '{text_field}'",
            found="fields with text: " + ", ".join(fields[:_MOST_RECORDS_SHOWN])
            if fields
            else type(record).__name__,
            action=f"set calibration.text_field={near[0]}"
            if near
            else "give one object a line, with a field of text",
        )
    text: str = record[text_field]
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON's escapes can spell it
        raise InputError(
            f"{where} holds half of a surrogate pair, which is no character",
            found=ascii(text[max(error.start - 20, 0) : error.end + 20]),
            action="write the file again from whole characters",
        ) from error
    return text


def _is_text(kind: Any) -> bool:
    """Whether a column's type is text, in any of Arrow's forms; the texts of categories lie in a dictionary."""
    from pyarrow import types

    return str(kind.value_type if types.is_dictionary(kind) else kind) in _TEXT_TYPES


def _read_parquet(path: Path, text_field: str) -> Texts:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as missing:
        raise InputError(
            f"reading {path} needs the package 'pyarrow'",
            action="pip install pyarrow, or give the text as .jsonl",
        ) from missing
    try:
        table = parquet.ParquetFile(path)
        names = [field.name for field in table.schema_arrow if _is_text(field.type)]
        if text_field not in names:
            _text_of(dict.fromkeys(names, ""), text_field, str(path))
        return [text or "" for text in table.read(columns=[text_field]).column(0).to_pylist()]
    except InputError:
        raise
    except Exception as error:  # pyarrow's own kinds
        raise _unreadable(path, error) from error
