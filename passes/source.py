"""The model a user names: a Hugging Face folder, a GGUF file or a hub name, behind one interface.

A `ModelSource` has the configuration, binds weights (`checkpoint.Source`), writes the tokenizer's files for
an engine, and knows every id that ends a text. Bad inputs are one InputError each, before any work.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from enginewright.passes.adapter import Adapter
from enginewright.passes.checkpoint import HuggingFaceFolder, Source
from enginewright.passes.weights import Weight
from enginewright.recipes.errors import InputError, near_matches

__all__ = ["ModelSource", "open_source"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
_SAVED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NAMED_TEMPLATES = "additional_chat_templates"
_LOCAL_KEYS = ("is_local", "local_files_only", "name_or_path", "_commit_hash", "vocab_file", "tokenizer_file")
_SAMPLES = ("Hello, world! 12 + 3\n\tx = 'é 日本語 👩‍👩‍👧'", " two  spaces", "")


def open_source(
    model: str | os.PathLike[str], adapter: str | os.PathLike[str] | None = None, *, weights: bool = True
) -> ModelSource:
    """Open a model by path or hub name, with a LoRA adapter's folder to be merged into it.

    Without `weights`, a hub name's are not fetched: the configuration is all that will be read.
    Raises InputError for what is not a causal language model on this disk, or not such an adapter.
    """
    source = _open(model, weights)
    if adapter is not None:
        source.adapter = Adapter(Path(adapter).expanduser())
    return source


def _open(model: str | os.PathLike[str], weights: bool) -> ModelSource:
    path = Path(model).expanduser()
    if not path.exists():
        path = _from_hub(str(model), weights)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" and path.suffix != ".gguf":
                raise InputError(
                    f"{path} is not a model",
                    expected="a Hugging Face folder or a .gguf file",
                    action=f"give the folder: {path.parent}"
                    if path.suffix in (".safetensors", ".bin")
                    else None,
                )
        return ModelSource(_gguf(path))
    if (path / "config.json").is_file():
        return ModelSource(_folder(path))
    if (path / "adapter_config.json").is_file():
        raise _adapter(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise InputError(f"{path} holds several GGUF files", found=names, action="name one of them")
    return ModelSource(_gguf(files[0]) if files else _folder(path))


class ModelSource:
    """An opened model. `config` ends a text at every id that the model's own files name."""

    def __init__(self, weights: Source) -> None:
        self._weights = weights
        self.adapter: Adapter | None = None
        self.path = weights.path
        self.config = weights.config
        self.name = self.path.stem if self.path.is_file() else self.path.resolve().name
        _require_causal(self.config, self.path)
        self.config.eos_token_id = self.eos_token_ids or None

    def bind(self, model: Any) -> tuple[dict[str, Weight], list[str]]:
        """Weights for every name in the meta model's `state_dict()`, tied ones as one object, and notes."""
        weights, notes = self._weights.bind(model)
        if self.adapter is None:
            return weights, notes
        merged, note = self.adapter.merge(model, weights)
        return merged, [*notes, note]

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The model's generation_config.json; empty where it has none."""
        file = self.path / "generation_config.json"
        if not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read as JSON", found=str(error)) from error
        return content if isinstance(content, dict) else {}

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a text: of the configuration, the generation configuration and the tokenizer."""
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        named = [getattr(self.config, "eos_token_id", None), self.generation_config.get("eos_token_id"), eos]
        flat = [item for value in named for item in (value if isinstance(value, (list, tuple)) else [value])]
        vocabulary = getattr(self.config, "vocab_size", None)
        return sorted(
            {item for item in flat if isinstance(item, int) and 0 <= item < (vocabulary or item + 1)}
        )

    @cached_property
    def tokenizer(self) -> Any | None:
        """transformers' tokenizer; None for a folder without tokenizer files."""
        from_file = getattr(self._weights, "tokenizer", None)
        if from_file is not None:
            return from_file()
        if not any((self.path / name).is_file() for name in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            said = (str(error) or repr(error)).splitlines()[0]
            raise InputError(f"transformers cannot read the tokenizer in {self.path}", found=said) from error

    def write_tokenizer(self, folder: str | os.PathLike[str]) -> list[str]:
        """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja; return the names.

        `tokenizer_config.json` gains `eos_token_ids`. Raises InputError when the `tokenizers` library alone
        would not encode as transformers does. A model without a tokenizer writes nothing.
        """
        if self.tokenizer is None:
            return []
        if not getattr(self.tokenizer, "is_fast", False):
            raise InputError(
                f"the tokenizer of {self.path} has no tokenizer.json form",
                found=type(self.tokenizer).__name__,
                action="convert it: AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…)",
            )
        folder = Path(folder)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            self.tokenizer.save_pretrained(scratch)
            made = {name: Path(scratch) / name for name in _SAVED}
            inputs = list(self.tokenizer.model_input_names)
            _tidy(made["tokenizer_config.json"], self.eos_token_ids, inputs)
            _require_same(made["tokenizer.json"], self.tokenizer, self.path)
            for file in sorted((Path(scratch) / _NAMED_TEMPLATES).glob("*.jinja")):
                made[f"{_NAMED_TEMPLATES}/{file.name}"] = file
                (folder / _NAMED_TEMPLATES).mkdir(exist_ok=True)
            names = [name for name, file in made.items() if file.is_file()]
            for name in names:
                made[name].replace(folder / name)
        return names

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over sizes and samples of the files, to tell models apart without reading all of them."""
        kinds = (".json", ".safetensors", ".bin", ".model", ".jinja")
        files = [self.path] if self.path.is_file() else sorted(self.path.iterdir())
        own = _fingerprint(file for file in files if self.path.is_file() or file.suffix in kinds)
        if self.adapter is None:
            return own
        return hashlib.sha256(f"{own}{self.adapter.fingerprint}".encode()).hexdigest()


def _gguf(path: Path) -> Source:
    try:
        from enginewright.passes.gguf import GgufSource
    except ModuleNotFoundError as missing:
        raise InputError(
            f"reading {path} needs the package {missing.name!r}", action="pip install gguf"
        ) from missing
    return GgufSource(path)


def _folder(path: Path) -> Source:
    weights = any(any(path.glob(pattern)) for pattern in ("model*.safetensors*", "pytorch_model*.bin*"))
    if (path / "adapter_config.json").is_file() and not weights:
        raise _adapter(path)
    return HuggingFaceFolder(path)


def _adapter(path: Path) -> InputError:
    try:
        base = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
    except (OSError, ValueError, AttributeError):
        base = None
    return InputError(
        f"{path} is an adapter, not a model",
        found=f"adapter_config.json{f' for {base}' if base else ''}",
        expected="a whole model",
        action="name the whole model, and give this folder as --adapter",
    )


def _require_causal(config: Any, path: Path) -> None:
    """Refuse encoders, classifiers and other kinds before anything is captured."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    known = causal.get(config.model_type)
    named = list(getattr(config, "architectures", None) or [])
    generates = [
        name for name in named if name == known or re.search("CausalLM|LMHead|ConditionalGeneration", name)
    ]
    if known is None or (named and not generates):
        raise InputError(
            f"{path} is not a causal language model",
            found=", ".join(named) or f"model type {config.model_type}",
            expected=f"{known}" if known else "a decoder that transformers loads with AutoModelForCausalLM",
        )


def _from_hub(name: str, weights: bool) -> Path:
    """Download a model by hub name where that is allowed, and return its folder. A path's name is no hub name."""
    missing = f"there is no such folder or file: {name}"
    hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith((".", "models/"))
    if not hub_name or name.endswith(".gguf"):
        raise InputError(missing, action=_advice(Path(name).expanduser()))
    offline = next((key for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(key)), None)
    if offline:
        raise InputError(
            missing,
            found=f"as a hub name it needs a network ({offline} is set)",
            action=f"{_advice(Path(name))} For a hub name: unset {offline}",
        )
    try:
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.model", "*.jinja", *(["*.safetensors"] if weights else [])]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        said = (str(error) or repr(error)).splitlines()[0].removeprefix("Got: ")
        raise InputError(
            missing, found=f"the hub did not give a model of this name: {said}", action=_advice(Path(name))
        ) from error


def _advice(path: Path) -> str:
    """What stands beside a path that does not exist and looks like it; else what a model is."""
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    likely = near_matches(path.name, beside, 1)
    return (
        f"did you mean {path.parent / likely[0]}?"
        if likely
        else "give a Hugging Face folder or a .gguf file."
    )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


def _tidy(file: Path, eos_token_ids: list[int], inputs: list[str]) -> None:
    """Drop where the tokenizer came from, so that equal models give equal bytes; add the end ids.

    A tokenizer of no model's own class gets the name that transformers 4 knows, too, and `inputs`, of which 4 assumes more.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    kept["eos_token_ids"] = eos_token_ids
    if kept.get("tokenizer_class") == "TokenizersBackend":
        kept |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _require_same(file: Path, tokenizer: Any, path: Path) -> None:
    """Hold the saved tokenizer.json, alone, against transformers."""
    import tokenizers

    alone = tokenizers.Tokenizer.from_file(str(file))
    alone.no_truncation()
    alone.no_padding()
    specials = "".join(map(str, tokenizer.all_special_tokens[:4]))
    for text in (*_SAMPLES, f"a{specials}b"):
        ours, theirs = alone.encode(text).ids, list(tokenizer(text)["input_ids"])
        if ours != theirs:
            raise InputError(
                f"the tokenizer of {path} does more than its tokenizer.json says",
                found=f"{text!r} gives {ours[:12]} from tokenizer.json",
                expected=f"{theirs[:12]}, as transformers encodes it",
            )


def _fingerprint(files: Iterable[Path]) -> str:
    """Each file adds its name, its size, its first MiB, and 4 KiB from each of 256 evenly spaced places."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            for index in range(256 if size > 1 << 20 else 0):
                file.seek(size * index // 256)
                digest.update(file.read(4096))
    return digest.hexdigest()
