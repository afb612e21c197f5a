"""Every model family through the whole compiler and ONNX Runtime: the logits that transformers gives, however prompts are cut.

Pools are filled with NaN first: what no step has written, and what a sequence must not see, is never read.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.backends.stepping import Floats, Stepper, alone, in_chunks
from tests.passes.architectures import ARCHITECTURES

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.backends.onnx.programs import PROMPTS, expected, load, worst

TOLERANCE = 1e-4
#: Between them: windows, sinks, soft caps, ALiBi, partial and interleaved rope, experts, tied tables, keys wider than values.
EVERYDAY = ("llama", "gemma2", "gpt2", "opt", "gptj", "gpt_oss", "deepseek_v3", "mpt")


@pytest.mark.parametrize(
    "arch",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES],
)
def test_logits_equal_transformers_however_prompts_are_cut(arch: str) -> None:
    executor = load(arch)
    ways = {
        "each prompt alone, whole": alone(executor, PROMPTS, 64),
        "all prompts in one step": in_chunks(executor, PROMPTS, 64),
        "all prompts, 23 tokens a step": in_chunks(executor, PROMPTS, 23),
        "a prefill beside decodes": mixed(executor),
    }
    executor.close()
    for way, found in ways.items():
        assert worst(found, expected(arch)) <= TOLERANCE, way


def mixed(executor) -> dict[str, Floats]:  # type: ignore[no-untyped-def]
    """The long prompt's end is decoded and verified four tokens at a time, while the others arrive in chunks."""
    stepper = Stepper(executor)
    long, middle, short = (PROMPTS[name] for name in ("long", "middle", "short"))
    plan = [
        {"long": long[:50]},
        {"middle": middle[:10], "long": long[50:51]},
        {"long": long[51:55], "short": short},
        {"middle": middle[10:], "long": long[55:56]},
        {"long": long[56:]},
    ]
    found: dict[str, list[Floats]] = {name: [] for name in PROMPTS}
    for rows in plan:
        for name, logits in stepper.feed(**rows).items():
            found[name].append(logits)
    return {name: np.concatenate(parts) for name, parts in found.items()}
