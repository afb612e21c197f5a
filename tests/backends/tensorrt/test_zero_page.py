"""The zero page takes what padding writes, which may be no number: no sequence may read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx")

from enginewright.backends.tensorrt.executor import TensorRTExecutor
from tests.backends.stepping import Stepper
from tests.backends.tensorrt.programs import final
from tests.backends.tensorrt.test_served_network import loaded

TEXT = [(i * 37 + 5) % 128 for i in range(60)]


def spoil_the_zero_pages(executor: Any) -> None:
    """As a padding row does whose keys and values overflow."""
    pools, stream = executor._pools, executor._stream
    for names, count in zip(pools._names, pools.pages, strict=True):
        for name in names:
            size = pools._page_bytes[name]
            stream.fill(pools._places[name] + count * size, 0xFF, size)
    stream.synchronise()


def fed(executor: TensorRTExecutor, spoiled: bool) -> list[np.ndarray]:
    """A sequence far past its windows beside a short one: in a chunk, and in a decode step."""
    stepper = Stepper(executor)
    stepper.feed(long=TEXT[:32])
    stepper.feed(long=TEXT[32:50])
    found = []
    for rows in ({"long": TEXT[50:57], "short": TEXT[:2]}, {"long": TEXT[57:58], "short": TEXT[2:3]}):
        if spoiled:
            spoil_the_zero_pages(executor)
        found += stepper.feed(**rows).values()
    return found


@pytest.mark.parametrize("arch", ["gemma2", "gpt_oss", "mistral", "llama"])
def test_what_lies_in_the_zero_page_reaches_no_logit(arch: str, tmp_path: Path) -> None:
    device, _, executor = loaded(tmp_path, final(arch)[0])
    wanted, found = (fed(executor, spoiled) for spoiled in (False, True))
    assert all(np.array_equal(one, other) for one, other in zip(wanted, found, strict=True))
    executor.close()
    device.assert_clean()
