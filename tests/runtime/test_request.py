"""Sampling options are checked where they are made; seeds of several answers; which rows a request wants."""

from __future__ import annotations

import math
from typing import Any

import pytest

from enginewright.recipes.errors import RequestError
from enginewright.runtime.constraints import Constraint
from enginewright.runtime.request import Request, SamplingOptions, derived_seed

BAD: dict[str, list[Any]] = {
    "top_k": [-1, 1.5, True, "3"],
    "top_p": [-0.1, 1.1, math.nan, "0.5", None],
    "min_p": [-0.1, 1.1, math.inf],
    "typical_p": [2],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "presence_penalty": [3, True],
    "repetition_penalty": [0, -1.0, math.inf, math.nan],
    "logit_bias": [
        5,
        {1: 101},
        {1: math.nan},
        {-1: 1},
        {2**31: 0},
        {"1": 1},
        {1.5: 1},
        [(1, 2), (1, 3)],
        [7],
    ],
    "min_tokens": [-1, 0.5, 9],
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [-1, 21],
    "constraint": ["{}", {}],
    "temperature": [-1, math.nan, math.inf, 10**400],
    "max_tokens": [-1, 1.0],
}


@pytest.mark.parametrize("name", BAD)
def test_an_option_out_of_range_is_refused_by_its_name(name):
    for value in BAD[name]:
        with pytest.raises(RequestError, match=name):
            SamplingOptions(**{"max_tokens": 8, name: value})


def test_options_are_kept_in_one_form():
    options: SamplingOptions = SamplingOptions(
        logit_bias={9: -100, 3: 1}, min_tokens=4, max_tokens=4, top_p=0, logprobs=20
    )
    assert options.logit_bias == ((3, 1.0), (9, -100.0)) and isinstance(options.top_p, float)
    assert options == SamplingOptions(
        logit_bias=[(3, 1.0), (9, -100.0)], min_tokens=4, max_tokens=4, top_p=0.0, logprobs=20
    )
    assert hash(options) == hash(SamplingOptions(**{f: getattr(options, f) for f in options.__dict__}))


def test_seeds_of_choices_differ_and_are_seeds():
    seeds = [derived_seed(seed, i) for seed in (0, 1, 2, 7, 2**64 - 1) for i in range(200)]
    assert derived_seed(7, 0) == 7
    assert len(set(seeds)) == len(seeds)
    assert all(SamplingOptions(seed=seed).seed == seed for seed in seeds)
    assert derived_seed(7, 1) == 12935044349602308024, (
        "a change alters every answer of n > 1: it must be meant"
    )


def test_a_constraint_is_text_that_can_be_compiled():
    assert Constraint.json_schema({"type": "object"}) == Constraint.json_schema('{"type": "object"}')
    for make, value in [
        (Constraint.json_schema, "{"),
        (Constraint.json_schema, [1]),
        (Constraint.json_schema, {"a": math.nan}),
        (Constraint.json_schema, {"a": object()}),
        (Constraint.regex, ""),
        (Constraint.regex, 5),
        (Constraint.lark, "x" * 600_000),
    ]:
        with pytest.raises(RequestError):
            make(value)


def test_rows_wanted():
    plain = Request([1, 2, 3, 4, 5], SamplingOptions())
    plain.limit = 10
    assert plain.first_row == 4 and plain.draws
    assert list(plain.wanted_rows(3)) == [] and list(plain.wanted_rows(5)) == [4]
    scored = Request([1, 2, 3, 4, 5], SamplingOptions(prompt_logprobs=0))
    scored.limit = 10
    assert list(scored.wanted_rows(3)) == [0, 1, 2] and scored.first_row == 0
    scored.prompt_logprobs += [(-1.0, [])] * 2
    assert scored.first_row == 2 and list(scored.wanted_rows(5)) == [2, 3, 4]  # as after a preemption
    scored.limit = 5  # nothing is generated: the last row tells of no prompt token
    assert list(scored.wanted_rows(5)) == [2, 3] and not scored.draws
    kept = Request([1, 2, 3], keep_logits=True)
    assert list(kept.wanted_rows(2)) == [0, 1]
