"""The options of `engine serve`, wherever they are given; nothing is served here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from enginewright.cli import engine
from enginewright.serving import serve

NAMES = [option.name for option in serve.params if option.name not in ("path", "config")]


def from_file(folder: Path, **values: Any) -> dict[str, Any]:
    """The options that a file with `values` gives."""
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump(values))
    return serve.make_context("serve", ["ENGINE", "--config", str(config)]).params


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], [{"a": 1}]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_value_is_refused_in_a_file(tmp_path: Path, name, value):
    with pytest.raises(click.BadParameter, match="expected: one value"):
        from_file(tmp_path, **{name: value})


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_value_in_a_file_sets_nothing(tmp_path: Path, name):
    assert from_file(tmp_path, **{name: None}) == from_file(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_sequences", 4.5),
        ("max_sequences", True),
        ("port", 0.5),
        ("drain", float("nan")),
        ("stall", "NaN"),
        ("draft_tokens", 0),
        ("draft_tokens", 2.5),
        ("draft_tokens", True),
        ("draft_rule", "exact"),
    ],
)
def test_a_file_is_as_strict_as_the_command_line(tmp_path: Path, name, value):
    with pytest.raises(click.BadParameter):
        from_file(tmp_path, **{name: value})
    with pytest.raises(click.BadParameter):
        serve.make_context("serve", ["ENGINE", f"--{name.replace('_', '-')}", str(value)])


@pytest.mark.parametrize(
    ("value", "keys"), [("secret", ("secret",)), (123, ("123",)), (["a", 5], ("a", "5")), ([], ())]
)
def test_a_key_in_a_file_may_stand_alone(tmp_path: Path, value, keys):
    assert from_file(tmp_path, api_key=value)["api_key"] == keys


def test_values_of_a_file_are_taken(tmp_path: Path):
    given = from_file(
        tmp_path, **{"kv-memory": 1 << 20, "drain": 2.5, "log-prompts": True, "policy": "latency"}
    )
    taken = (given["kv_memory"], given["drain"], given["log_prompts"], given["policy"])
    assert taken == (1 << 20, 2.5, True, "latency")


@pytest.mark.parametrize(("value", "tokens"), [(4, 4), ("4", 4), ("auto", "auto"), (None, "auto")])
def test_draft_tokens_of_a_file(tmp_path: Path, value, tokens):
    given = from_file(tmp_path, speculate="ngram", **{"draft-tokens": value})
    assert (given["speculate"], given["draft_tokens"], given["draft_rule"]) == ("ngram", tokens, "same")


@pytest.mark.parametrize("key", [" ", "key ", "\tkey"])
def test_a_key_that_no_client_could_send_is_refused(key):
    done = CliRunner().invoke(engine, ["serve", "ENGINE", "--api-key", key])
    assert done.exit_code == 2 and "API key" in done.output
