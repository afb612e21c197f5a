"""The answers of a written folder, as transformers gives them: what verification holds against the judge.

Each sample is one forward pass over all its tokens, in float32. What the folder says about activations (int-quantized) is
applied by compressed-tensors.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from enginewright.backends.artifact import Artifact
from enginewright.passes.weight_files import read_json
from enginewright.recipes.errors import LoweringError

__all__ = ["FolderAnswers"]


class _Text:
    """Encodes as the folder's tokenizer.json does."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


class FolderAnswers:
    """What `verify` asks of an engine, from transformers. Raises LoweringError where transformers cannot read the folder."""

    def __init__(self, engine: Artifact) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        self.artifact = engine
        facts = engine.manifest["model"]
        self.vocab_size, self.max_context = int(facts["vocab_size"]), int(facts["max_context"])
        file = engine.path / "tokenizer.json"
        self.tokenizer = _Text(file) if file.is_file() else None
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with _quiet(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the folder's own settings hold beside `dequantize`
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    engine.path,
                    local_files_only=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                    **_options(engine),
                )
        except Exception as error:
            said = (str(error) or repr(error)).splitlines()[0]
            raise LoweringError(
                f"transformers cannot read the checkpoint that was written for {facts.get('source')}",
                found=said,
            ) from error
        finally:
            if shown:
                logging.enable_progress_bar()
        self._model, report = loaded
        strange = [name for kind in ("missing_keys", "unexpected_keys") for name in sorted(report[kind])]
        if strange:
            raise LoweringError(
                f"transformers does not find the tensors of {facts.get('source')} under their names",
                found=", ".join(strange[:4]),
                expected="every tensor of the folder, and no other",
            )
        self._model.eval()

    def __enter__(self) -> FolderAnswers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._model

    def logits(
        self, sequences: Sequence[Sequence[int]], chunk_size: int | None = None
    ) -> list[npt.NDArray[np.float32]]:
        """Logits [T, vocab] of each sequence; `chunk_size` changes nothing."""
        found = []
        with _quiet(), torch.inference_mode():
            for tokens in sequences:
                ids = torch.tensor([list(tokens)])
                found.append(self._model(input_ids=ids, use_cache=False).logits[0].float().numpy())
        return found


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Keeps compressed-tensors' progress bars, which no setting turns off, from the screen."""
    return contextlib.redirect_stderr(io.StringIO())


def _options(engine: Artifact) -> dict[str, Any]:
    """compressed-tensors 0.20 cannot load packed zero points into a compressed model: such folders are read dequantised."""
    from transformers import CompressedTensorsConfig

    settings = read_json(engine.path / "config.json").get("quantization_config") or {}
    groups = settings.get("config_groups", {}).values()
    if all(group["weights"]["symmetric"] for group in groups):
        return {}
    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}
