"""The onnx backend's executor: numpy and onnxruntime, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.backends.base import KvGroupInfo, StepError, StepInput, StepLimits, check_step
from enginewright.backends.onnx.pools import CacheSpec, Pools
from enginewright.backends.onnx.providers import DEVICES, open_session
from enginewright.backends.onnx.runs import Reading, Run, parts, run_of
from enginewright.recipes.errors import ArtifactError, InputError

__all__ = ["OnnxExecutor"]

Floats = npt.NDArray[np.float32]


class OnnxExecutor:
    """Runs the plain flavour's model. See `enginewright.backends.base.Executor` for the methods' contract.

    `model`: model.onnx, its weights beside it. `threads`: None takes one for each core that the process may use. `provider`:
    cpu, cuda or tensorrt-rtx. `weights`: only "mmap", since ONNX Runtime maps and packs them in its own way. `max_tokens`,
    `max_rows`: rows and logit rows a step may have.

    Raises InputError for options, ArtifactError for a model that ONNX Runtime refuses or that is none of ours.
    """

    def __init__(
        self,
        model: Path,
        *,
        threads: int | None = None,
        weights: str = "mmap",
        max_tokens: int = 512,
        max_rows: int | None = None,
        provider: str = "cpu",
    ) -> None:
        _check_options(threads, weights, max_tokens, max_rows)
        self._session, self.threads = open_session(model, provider, threads)
        facts = _facts(self._session, model)
        self.isa = f"onnxruntime {provider}"
        self.max_tokens = max_tokens
        self.max_rows = max_tokens if max_rows is None else max_rows
        self.vocab_size: int = facts["vocab_size"]
        self.max_positions: int = facts["max_context"]
        self._weights = model.with_name(model.name + ".data").stat().st_size
        specs = [
            CacheSpec(f"{kind}_cache_{g}_{i}", g, layer["kv_heads"] * layer[f"{kind}_dim"], layer["format"])
            for g, group in enumerate(facts["kv_groups"])
            for i, layer in enumerate(group["layers"])
            for kind in ("key", "value")
        ]
        self._groups = facts["kv_groups"]
        known = {value.name for value in self._session.get_inputs()}
        held = [spec for spec in specs if spec.name in known]  # a part of a model may lack some
        self._pools = Pools(held, [group["page_size"] for group in self._groups], DEVICES[provider])
        self.kv_groups: Sequence[KvGroupInfo] = [
            KvGroupInfo(
                group["window"],
                group["page_size"],
                group["page_size"] * sum(spec.slot_bytes for spec in specs if spec.group == g),
                group["format"],
                len(group["layers"]),
            )
            for g, group in enumerate(self._groups)
        ]
        self._reading: list[Reading] = []
        self._binding: Any = None

    # Pools.

    def create_pool(self, pages_per_group: Sequence[int]) -> None:
        pages = list(pages_per_group)
        if len(pages) != len(self._groups) or any(count < 1 for count in pages):
            raise StepError(
                "pools", found=pages, expected=f"a number of pages for each of {len(self._groups)} KV groups"
            )
        self._open()
        self._binding = None
        self._pools.create(pages)
        self._reading = [
            Reading(group["window"], group["page_size"], self._pools.zero_slot(g), group["sinks"])
            for g, group in enumerate(self._groups)
        ]
        self._binding = self._session.io_binding()
        self._pools.bind(self._binding)

    def copy_pages(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._having_pools()
        self._pools.copy_pages(group, sources, destinations)

    def fill_pool(self, value: float) -> None:
        """Set every number of the pools: tests fill them with NaN to see that nothing unwritten is read."""
        self._pools.fill(value)

    def cache_addresses(self) -> Mapping[str, int]:
        """Where each cache lies: a step never moves it."""
        return self._pools.addresses()

    # Steps.

    def step(self, step: StepInput) -> Floats:
        self._having_pools()
        limits = StepLimits(
            self.max_tokens,
            self.max_rows,
            self.vocab_size,
            self.max_positions,
            self.kv_groups,
            self._pools.pages,
        )
        check_step(step, limits)
        logits = np.empty((len(step.logit_rows), self.vocab_size), np.float32)
        for chosen in parts((step.seq_starts[1:] - step.seq_starts[:-1]).astype(np.int64)):
            run = run_of(step, chosen, self._reading)
            logits[run.logit_places] = self._run(run)
        return logits

    def _run(self, run: Run) -> Floats:
        rows = len(run.logit_places)
        if not rows:  # a model whose last product has no rows: one is asked for, and dropped
            run.inputs["logit_rows"] = np.zeros(1, np.int64)
        for name, array in run.inputs.items():
            self._binding.bind_cpu_input(name, np.ascontiguousarray(array))
        found = np.empty((max(rows, 1), self.vocab_size), np.float32)
        self._binding.bind_output("logits", "cpu", 0, np.float32, found.shape, found.ctypes.data)
        self._session.run_with_iobinding(self._binding)
        return found[:rows]

    # The rest.

    def memory(self) -> Mapping[str, int]:
        """Bytes of the weights' file and of the pools. ONNX Runtime packs weights again in its own memory."""
        pool = self._pools.bytes_of(self._pools.pages) if self._pools.pages else 0
        return {"weights": self._weights, "pool": pool}

    def close(self) -> None:
        self._binding = self._session = None
        self._pools.drop()

    def _open(self) -> None:
        if self._session is None:
            raise StepError("the executor is closed")

    def _having_pools(self) -> None:
        self._open()
        if self._binding is None:
            raise StepError("there is no pool", action="call create_pool first")


def _facts(session: Any, model: Path) -> dict[str, Any]:
    """What the model's metadata says of it."""
    text = session.get_modelmeta().custom_metadata_map.get("enginewright", "")
    try:
        facts = json.loads(text)
        if facts["version"] == 1 and facts["flavour"] == "plain":
            return dict(facts)
        found = f"version {facts['version']}, flavour {facts['flavour']}"
    except (ValueError, KeyError, TypeError):
        found = "no facts of ours in its metadata"
    raise ArtifactError(
        f"{model} is no model that this runtime serves",
        found=found,
        expected="version 1, flavour plain",
        action="build the engine again with `optimize`",
    )


def _check_options(threads: int | None, weights: str, max_tokens: int, max_rows: int | None) -> None:
    if threads is not None and not 1 <= threads <= 1024:
        raise InputError("threads cannot be used", found=threads, expected="1 to 1024")
    if weights != "mmap":
        raise InputError(
            "the onnx backend cannot load weights that way",
            found=f"weights={weights!r}",
            expected="'mmap': ONNX Runtime maps the file, and keeps packed copies of its own",
            action="leave weights out",
        )
    for name, value in (("max_tokens", max_tokens), ("max_rows", max_rows)):
        if value is not None and not 1 <= value <= 1 << 20:
            raise InputError(f"{name} cannot be used", found=value, expected=f"1 to {1 << 20}")
