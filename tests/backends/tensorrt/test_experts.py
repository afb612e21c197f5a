"""Experts are computed on every token: what one makes of tokens that did not choose it must not reach them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tensorrt_rtx")

from enginewright.backends.reference.executor import ReferenceExecutor
from enginewright.backends.tensorrt.api import new_network
from enginewright.backends.tensorrt.interpreter.executor import InterpretedExecutor
from enginewright.backends.tensorrt.lower import define
from enginewright.passes.program import Program
from tests.backends.stepping import alone
from tests.backends.tensorrt.programs import final_of
from tests.passes.architectures import ARCHITECTURES, write_tokenizer

PROMPTS = {"a": [(i * 37 + 5) % 128 for i in range(40)]}


def with_a_loud_expert(arch: str, folder: Path) -> Path:
    """The architecture's model, whose first expert overflows f16 and is chosen by no token: of two pairs of others, each has
    one whose score lies above its own, which is 0."""
    model: Any = ARCHITECTURES[arch]()
    with torch.no_grad():
        for layer in model.model.layers:
            experts, router = layer.mlp.experts, layer.mlp.gate.weight
            experts.gate_up_proj[0] *= 1e3
            experts.down_proj[0] *= 1e3
            router[0], router[2], router[4] = 0, -router[1], -router[3]
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def interpreted(program: Program) -> InterpretedExecutor:
    network, _ = new_network()
    lowered, facts = define(program, network), program.facts
    return InterpretedExecutor(
        network,
        lowered.arrays,
        groups=facts.kv_groups,
        vocab_size=facts.vocab_size,
        max_context=facts.max_context,
    )


@pytest.mark.parametrize(
    "formats", [(), ("linear.weight=int8", "linear.activation=f16")], ids=["f16", "int8"]
)
def test_an_expert_that_overflows_is_no_matter_to_who_did_not_choose_it(
    formats: tuple[str, ...], tmp_path: Path
) -> None:
    program, _ = final_of(with_a_loud_expert("mixtral", tmp_path / "model"), "fp16", *formats)
    wanted = alone(ReferenceExecutor(program), PROMPTS, 64)["a"]
    found = alone(interpreted(program), PROMPTS, 64)["a"]
    assert np.isfinite(wanted).all()
    error = np.abs(found - wanted).max(1) / np.abs(wanted).max()
    assert np.median(error) < 5e-3 and np.isfinite(error).all()
