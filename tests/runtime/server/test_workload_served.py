"""A workload played against `engine serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

import enginewright
from enginewright.recipes.errors import InputError
from enginewright.runtime.traffic import play_in_process, play_over_http
from enginewright.runtime.workload import Lengths, Traffic, make_workload
from tests.passes.architectures import folder

from .served import served


def test_a_workload_against_the_server(tmp_path: Path) -> None:
    tiny = enginewright.optimize(folder("llama"), "fp32", tmp_path / "llama").path
    traffic = Traffic(requests=16, rate=200.0, prompt=Lengths(2, 30), new=Lengths(1, 20))
    with served(tiny, tmp_path / "log", "--api-key", "sesame") as address, enginewright.load(tiny) as loaded:
        arrivals = make_workload(
            "burst", traffic, vocab_size=loaded.vocab_size, max_context=loaded.max_context
        )
        over_http = play_over_http(address, arrivals, "sesame")
        in_process = play_in_process(loaded, arrivals)
        with pytest.raises(InputError, match=r"(?s)status 401.*to do: --api-key KEY"):
            play_over_http(address, arrivals)
    for ours, theirs in zip(in_process.served, over_http.served, strict=True):
        assert theirs.error is None and theirs.new_tokens == ours.new_tokens == ours.arrival.max_tokens
        assert theirs.prompt_tokens == ours.prompt_tokens
        assert 1 <= len(theirs.times) <= theirs.new_tokens
