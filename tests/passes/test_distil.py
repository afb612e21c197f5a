"""The map before a draft's last norm: the states it is learned from, the differentiable head, and what it brings."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.cut_draft import DraftHead, cut_draft
from enginewright.passes.distil import agreement, fit, logits_of_states, states_program, tune
from enginewright.passes.program import Program
from tests.passes.architectures import ARCHITECTURES
from tests.passes.families import some_tokens
from tests.passes.paged import Pools
from tests.passes.test_cut_draft import final

TOKENS = some_tokens(40)


def states(program: Program, layers: int, tokens: list[int] = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    probe, width = states_program(program, layers)
    found = Pools(probe, 16).step(tokens, 0)
    assert found.shape[1] == probe.facts.vocab_size >= program.facts.vocab_size
    early, late = found[:, :width].chunk(2, dim=1)
    return early, late


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= tolerance * want.abs().max())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_states_and_head_are_the_models(arch: str) -> None:
    program = final(arch)
    layers = program.facts.num_layers - 1
    early, late = states(program, layers)
    logits_of = logits_of_states(program, layers)
    assert near(logits_of(late), Pools(program, 16).step(TOKENS, 0))
    assert near(logits_of(early), Pools(cut_draft(program, layers), 16).step(TOKENS, 0))


@pytest.mark.parametrize(
    "arch", ["llama", "gpt2", "gemma3_text", "olmo2", "opt-postnorm", "falcon-multiquery"]
)
def test_a_draft_with_a_head_maps_its_sum(arch: str) -> None:
    program = final(arch)
    early, _ = states(program, 1)
    width = early.shape[1]
    generator = torch.Generator().manual_seed(5)
    head = DraftHead(
        torch.randn(width, width, generator=generator).bfloat16().float() / 8,
        torch.randn(width, generator=generator),
    )
    want = logits_of_states(program, 1)(head.apply(early))
    draft = cut_draft(program, 1, head)
    pools = Pools(draft, 16)
    got = pools.step(TOKENS, 0)
    assert near(got, want, 2e-2) and not near(got, logits_of_states(program, 1)(early), 0.1)
    plain = Pools(cut_draft(program, 1), 16)
    plain.step(TOKENS, 0)
    for name, values in plain.pools.items():
        assert torch.equal(values.nan_to_num(7.0), pools.pools[name].nan_to_num(7.0)), "keys and values stay"
    nothing = cut_draft(program, 1, DraftHead(torch.zeros(width, width), torch.zeros(width)))
    assert near(Pools(nothing, 16).step(TOKENS, 0), Pools(cut_draft(program, 1), 16).step(TOKENS, 0))


@pytest.mark.parametrize("recipe", ["bf16", "int8", "int4"])
def test_the_head_is_that_of_the_rounded_matrices(recipe: str) -> None:
    program = final("llama", recipe)
    _, late = states(program, 1)
    want = Pools(program, 16).step(TOKENS, 0)
    # The function does not round activations; the engine's head does.
    assert near(logits_of_states(program, 1)(late), want, 2e-2)


def test_the_least_squares_map_is_found() -> None:
    generator = torch.Generator().manual_seed(1)
    early = torch.randn(4000, 24, generator=generator) * torch.linspace(0.2, 3, 24)
    true = DraftHead(torch.randn(24, 24, generator=generator), torch.randn(24, generator=generator))
    found = fit(early, true.apply(early))
    assert near(found.matrix, true.matrix, 1e-2) and near(found.bias, true.bias, 1e-2)


def test_distilling_brings_the_draft_nearer() -> None:
    program = final("llama")
    texts = [some_tokens(60, seed) for seed in range(40)]
    pairs = [states(program, 1, text) for text in texts]
    early, late = (torch.cat(parts) for parts in zip(*pairs[:32], strict=True))
    judged = [torch.cat(parts) for parts in zip(*pairs[32:], strict=True)]
    logits_of = logits_of_states(program, 1)
    told: list[str] = []
    first = fit(early, late)
    tuned = tune(first, early, late, logits_of, 60, 3, told.append)
    shared, fitted, best = (agreement(head, *judged, logits_of) for head in (None, first, tuned))
    assert best.kl < fitted.kl < shared.kl and best.top1 > shared.top1
    assert len(told) == 6 and "60 of 60 steps" in told[-1]
    again = tune(first, early, late, logits_of, 60, 3)
    assert torch.equal(again.matrix, tuned.matrix) and torch.equal(again.bias, tuned.bias)
    same = agreement(None, late, late, logits_of)
    assert same.top1 == 1.0 and abs(same.kl) < 1e-5
