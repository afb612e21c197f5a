"""What Python uses of the native module: the engine (native/bind_engine.cpp) and rows of logits (bind_attention, bind_draw).

The submodules `kernels` and `attention` serve tests alone and are left out.
"""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]

class _KvGroup(TypedDict):
    window: int
    format: str
    page_size: int
    page_bytes: int
    layers: list[tuple[int, int, int]]
    """(kv_heads, key_dim, value_dim) of each layer."""

def argmax_rows(logits: _Floats) -> npt.NDArray[np.int64]: ...
def available_isas() -> list[str]: ...
def logsumexp_rows(logits: _Floats) -> _Floats: ...
def usable_cpus() -> int: ...

class Engine:
    def __init__(
        self,
        program: str,
        weights: str,
        mode: str = "mmap",
        *,
        max_tokens: int,
        max_rows: int,
        threads: int = 0,
        isa: str = "",
    ) -> None: ...
    @staticmethod
    def beside(other: Engine, program: str, max_tokens: int, max_rows: int) -> Engine: ...
    @property
    def isa(self) -> str: ...
    @property
    def kv_groups(self) -> list[_KvGroup]: ...
    @property
    def position_limit(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def close(self) -> None: ...
    def copy_pages(self, group: int, sources: _Ints, destinations: _Ints) -> None: ...
    def create_pool(self, pages_per_group: Sequence[int]) -> None: ...
    def fill_pool(self, value: float) -> None: ...
    def memory(self) -> dict[str, int]: ...
    def profile(self) -> list[tuple[str, str, int, int]]:
        """(op, module, nanoseconds of work, nanoseconds of waiting) of each instruction."""
    def set_profiling(self, on: bool) -> None: ...
    def step(
        self,
        tokens: _Ints,
        positions: _Ints,
        seq_starts: _Ints,
        context_lens: _Ints,
        page_tables: _Ints,
        logit_rows: _Ints,
        logits: _Floats,
    ) -> None: ...

class DrawRow:
    """One request's sampling options, and the tokens that penalties concern (runtime/sampler.py says what they mean)."""

    def __init__(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        min_gap: float,
        typical_p: float,
        seed: int,
        frequency: float,
        presence: float,
        repetition: float,
        bias_ids: Sequence[int],
        bias: Sequence[float],
        end_ids: Sequence[int],
        min_position: int,
        best: int,
    ) -> None: ...
    @property
    def seen(self) -> int: ...
    def extend(self, tokens: Sequence[int], prompt_tokens: int) -> None: ...

class RowDrawer:
    def __init__(self, threads: int = 1, isa: str = "") -> None: ...
    @staticmethod
    def beside(engine: Engine) -> RowDrawer: ...
    def draw(
        self,
        logits: _Floats,
        rows: Sequence[int],
        states: Sequence[DrawRow],
        positions: Sequence[int],
        masks: npt.NDArray[np.uint32] | None = None,
        mask_rows: Sequence[int] = (),
    ) -> tuple[list[int], list[float], list[list[tuple[int, float]] | None]]: ...
    def score(
        self, logits: _Floats, rows: Sequence[int], tokens: Sequence[int], best: int
    ) -> list[tuple[float, list[tuple[int, float]]]]: ...
