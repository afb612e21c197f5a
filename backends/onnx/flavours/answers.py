"""The answers of a written folder, from onnxruntime alone, fed as the runtime that it is written for feeds it.

Every sample is answered twice: alone, and with two others in a padded batch whose last tokens come one at a time over the cache.
The two must agree. What is held against the judge is the answer from the batch.

| flavour | a batch |
|---|---|
| genai | prompts padded on the right; caches are buffers, bound as past and present at once, full of NaN at first |
| optimum | prompts padded on the left, positions counted from the mask; each run's present is the next one's past |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from enginewright.backends.artifact import Artifact
from enginewright.backends.onnx.providers import open_session
from enginewright.recipes.errors import VerificationError

__all__ = ["FlavourAnswers", "FlavourModel"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_ROWS = 3  # of a batch
_DECODED = 3  # last tokens of a sample that come one at a time
_AGREE, _AGREE_ROUNDED = (
    1e-3,
    5e-2,
)  # shares of the largest logit; where activations are rounded, some round the other way


class FlavourModel:
    """A flavour's model.onnx, run by onnxruntime. Raises ArtifactError for a model that ONNX Runtime refuses."""

    def __init__(self, model: Path, flavour: str, threads: int | None = None) -> None:
        self.flavour = flavour
        self._session, _ = open_session(model, "cpu", threads)
        self._caches = [
            item for item in self._session.get_inputs() if item.name.startswith("past_key_values.")
        ]
        self._outputs = ["logits", *(_present(item.name) for item in self._caches)]

    def batch(self, rows: Sequence[Sequence[int]], decoded: int = _DECODED, cut: int = 0) -> list[Floats]:
        """Logits [T, vocab] of each row, all together: prompts first, then the last `decoded` tokens one a run.

        `cut`, for one row or an optimum model: the prompts come in pieces of so many columns.
        """
        return (self._shared if self.flavour == "genai" else self._growing)(rows, decoded, cut)

    # optimum.

    def _growing(self, rows: Sequence[Sequence[int]], decoded: int, cut: int) -> list[Floats]:
        width = max(map(len, rows))
        ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
        for at, row in enumerate(rows):
            ids[at, width - len(row) :], mask[at, width - len(row) :] = row, 1
        places = np.where(mask, mask.cumsum(1) - 1, 1)  # as transformers' generate counts them
        caches = [np.zeros((len(rows), 1, 0, 1), np.float32) for _ in self._caches]
        found: list[Floats] = []
        for start, end in _pieces(width, decoded, cut):
            feeds = {
                "input_ids": ids[:, start:end],
                "attention_mask": mask[:, :end],
                "position_ids": places[:, start:end],
            }
            feeds |= {item.name: cache for item, cache in zip(self._caches, caches, strict=True)}
            logits, *caches = self._session.run(self._outputs, feeds)
            found.append(logits)
        whole = np.concatenate(found, axis=1)
        return [whole[at, width - len(row) :] for at, row in enumerate(rows)]

    # genai.

    def _shared(self, rows: Sequence[Sequence[int]], decoded: int, cut: int) -> list[Floats]:
        prompts = [max(len(row) - decoded, 1) for row in rows]
        first, steps = max(prompts), max(len(row) - prompt for row, prompt in zip(rows, prompts, strict=True))
        buffers = [self._buffer(item, len(rows), first + steps) for item in self._caches]
        mask = np.zeros((len(rows), first + steps), np.int64)
        ids, places = np.zeros((2, len(rows), first), np.int64)
        for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            ids[at, :prompt], mask[at, :prompt], places[at, :prompt] = row[:prompt], 1, np.arange(prompt)
        found: list[list[Floats]] = [[] for _ in rows]
        for start, end in _pieces(first, 0, cut):
            logits = self._bound(ids[:, start:end], mask[:, :end], places[:, start:end], buffers)
            for at, prompt in enumerate(prompts):
                found[at].append(logits[at, : max(min(prompt, end) - start, 0)])
        for step in range(steps):
            mask[:, first + step] = 1
            wanted = [min(prompt + step, len(row) - 1) for row, prompt in zip(rows, prompts, strict=True)]
            ids = np.array([[row[place]] for row, place in zip(rows, wanted, strict=True)], np.int64)
            places = mask[:, : first + step + 1].sum(1, keepdims=True) - 1
            logits = self._bound(ids, mask[:, : first + step + 1], places, buffers)
            for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                if prompt + step < len(row):
                    found[at].append(logits[at])
        return [np.concatenate(parts) for parts in found]

    def _buffer(self, item: Any, batch: int, capacity: int) -> Any:
        _, heads, _, width = item.shape
        empty = np.full((batch, heads, capacity, width), np.nan, np.float32)
        return onnxruntime.OrtValue.ortvalue_from_numpy(empty)

    def _bound(self, ids: Ints, mask: Ints, places: Ints, buffers: Sequence[Any]) -> Floats:
        binding = self._session.io_binding()
        for name, array in (("input_ids", ids), ("attention_mask", mask), ("position_ids", places)):
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for item, buffer in zip(self._caches, buffers, strict=True):
            binding.bind_ortvalue_input(item.name, buffer)
            binding.bind_ortvalue_output(_present(item.name), buffer)
        binding.bind_output("logits")
        self._session.run_with_iobinding(binding)
        logits: Floats = binding.get_outputs()[len(buffers)].numpy()
        return logits


def _present(name: str) -> str:
    return name.replace("past_key_values", "present")


def _pieces(width: int, decoded: int, cut: int) -> Iterator[tuple[int, int]]:
    """Columns of each run: the prompt, whole or in pieces of `cut`, then one column a run."""
    prompt = max(width - decoded, min(width, 1))
    for start in range(0, prompt, cut or prompt):
        yield start, min(start + (cut or prompt), prompt)
    for start in range(prompt, width):
        yield start, start + 1


@dataclass(frozen=True)
class _Text:
    """Encodes as the folder's tokenizer.json does."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)


class FlavourAnswers:
    """What `verify` asks of an engine. Raises VerificationError where a padded batch answers otherwise than its rows alone."""

    def __init__(self, engine: Artifact, flavour: str) -> None:
        self.artifact = engine
        facts = engine.manifest["model"]
        self.vocab_size, self.max_context = int(facts["vocab_size"]), int(facts["max_context"])
        self.tokenizer = _text(engine.path / "tokenizer.json")
        self._model: FlavourModel | None = FlavourModel(engine.file("model.onnx"), flavour)
        self._agree = _AGREE if _exact_activations(engine.manifest["recipe"]) else _AGREE_ROUNDED

    def __enter__(self) -> FlavourAnswers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._model = None

    def logits(self, sequences: Sequence[Sequence[int]], chunk_size: int | None = None) -> list[Floats]:
        """Logits [T, vocab] of each sequence, from padded batches; `chunk_size` changes nothing."""
        assert self._model is not None, "the answers are closed"
        found: list[Floats] = []
        for start in range(0, len(sequences), _ROWS):
            rows = sequences[start : start + _ROWS]
            together = self._model.batch(rows)
            for row, batched in zip(rows, together, strict=True):
                self._require_same(
                    batched, self._model.batch([row], cut=61)[0], [len(other) for other in rows]
                )
            found += together
        return found

    def _require_same(self, batched: Floats, alone: Floats, lengths: Sequence[int]) -> None:
        with np.errstate(invalid="ignore"):
            away = float(np.abs(batched - alone).max() / np.abs(alone).max())
        if not away <= self._agree:
            raise VerificationError(
                "a padded batch gives other logits than its rows alone",
                found=f"{away:.3g} of the largest logit, rows of {', '.join(map(str, lengths))} tokens",
                expected=f"at most {self._agree:g}",
            )


def _text(file: Path) -> _Text | None:
    if not file.is_file():
        return None
    import tokenizers

    return _Text(tokenizers.Tokenizer.from_file(str(file)))


def _exact_activations(recipe: dict[str, Any]) -> bool:
    """Whether no product rounds its activations."""
    matrices = [recipe["linear"], recipe["head"], recipe["router"], *recipe["overrides"]]
    return all(matrix["activation"] == "f32" for matrix in matrices)
