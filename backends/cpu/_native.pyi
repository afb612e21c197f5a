"""What Python uses of the native module: the engine (native/bind_engine.cpp) and the sampler's rows (native/bind_attention.cpp).

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
