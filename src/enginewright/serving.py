"""`engine serve`: every option can also stand in a YAML file (--config) and in the environment (ENGINEWRIGHT_…)."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import yaml
from click.core import ParameterSource

from enginewright.recipes.errors import InputError, near_matches
from enginewright.runtime.policies import POLICIES

from .speculation_cli import SPECULATION

__all__ = ["Bytes", "serve"]

_PREFIX = "ENGINEWRIGHT_"
_OTHER_VARIABLES = ("ENGINEWRIGHT_ISA",)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class Bytes(click.ParamType):
    """A number of bytes: 2GiB, 512MiB, 1500000."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?", str(value).strip().lower())
        size = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
        if size < 1:
            self.fail(f"{value!r} is no size (expected: such as 2GiB or 512MiB)", param, ctx)
        return size


class _Seconds(click.FloatRange):
    """A time, of at least `min`."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):  # compares as neither too small nor too large
            self.fail(f"{value!r} is no time (expected: seconds, such as 30)", param, ctx)
        return seconds


def _read_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Make the file's values the defaults: the environment and the command line go before them."""
    if path is None or context.resilient_parsing:
        return path
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise click.BadParameter(f"{path} must hold `option: value` lines")
    known = {
        option.name: option for option in context.command.params if option.name not in ("config", "path")
    }
    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    for key in named:
        if key not in known:
            close = near_matches(key, [name for name in known if name])
            hint = f"; did you mean {close[0]}?" if close else ""
            raise click.BadParameter(f"{path} sets {key!r}, which is no option{hint}")
    given = {
        key: _from_file(path, key, value, known[key].multiple)
        for key, value in named.items()
        if value is not None
    }
    context.default_map = {**(context.default_map or {}), **given}
    return path


def _from_file(path: Path, key: str, value: Any, several: bool) -> str | list[str]:
    """Return a value of the file as the command line would spell it: 4.5 is no whole number there either."""
    if several and isinstance(value, list):
        return [str(_from_file(path, key, item, False)) for item in value]
    if not isinstance(value, (str, int, float)):
        kind = "one value, or a list of them" if several else "one value"
        raise click.BadParameter(f"{path} sets {key!r} to a {type(value).__name__} (expected: {kind})")
    return [str(value)] if several else str(value)


class _Option(click.Option):
    """An option whose errors say where its value stands, unless that is the command line."""

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.BadParameter as error:
            source = ctx.get_parameter_source(self.name or "")
            places = {
                ParameterSource.ENVIRONMENT: f"in {self.envvar}",
                ParameterSource.DEFAULT_MAP: "in --config",
            }
            if source not in places:
                raise
            raise click.BadParameter(f"{error.message} ({places[source]})", ctx=ctx, param=self) from None


def _option(name: str, *more: str, **settings: Any) -> Any:
    """An option with its variable: --kv-memory is ENGINEWRIGHT_KV_MEMORY."""
    variable = _PREFIX + name.removeprefix("--").upper().replace("-", "_")
    return click.option(name, *more, cls=_Option, envvar=variable, show_envvar=False, **settings)


def _warn_of_variables(context: click.Context) -> None:
    """Name the variables that look like an option's and are none."""
    known = [option.envvar for option in context.command.params if isinstance(option.envvar, str)]
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in (*known, *_OTHER_VARIABLES):
            close = near_matches(name.removeprefix(_PREFIX), [item.removeprefix(_PREFIX) for item in known])
            if close:
                click.echo(f"warning: {name} is no option; did you mean {_PREFIX}{close[0]}?", err=True)


_OPTIONS = [
    click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        envvar="ENGINEWRIGHT_CONFIG",
        help="YAML: any of these options, as `max-sequences: 16`.",
    ),
    _option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    _option(
        "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one."
    ),
    _option(
        "--kv-memory", metavar="SIZE", type=Bytes(), help="Memory of the key/value cache.  [default: 1GiB]"
    ),
    _option(
        "--max-context",
        metavar="N",
        type=click.IntRange(min=2),
        help="Tokens of a sequence at most.  [default: the engine's own]",
    ),
    _option(
        "--max-batch-tokens",
        metavar="N",
        type=click.IntRange(min=1),
        default=512,
        show_default=True,
        help="Tokens of a step.",
    ),
    _option(
        "--max-sequences",
        metavar="N",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Sequences computed together.",
    ),
    _option(
        "--threads",
        metavar="N",
        type=click.IntRange(min=1),
        help="Threads that compute.  [default: the cores that the process may use]",
    ),
    _option(
        "--policy",
        type=click.Choice(list(POLICIES)),
        default="fair",
        show_default=True,
        help="Whom the scheduler prefers; static and static-drop are for comparison.",
    ),
    *(_option(name, **settings) for name, settings in SPECULATION.items()),
    _option(
        "--draft-kv-memory",
        metavar="SIZE",
        type=Bytes(),
        help="Memory of the cache of an engine that drafts.  [default: 1GiB at most]",
    ),
    _option(
        "--served-model-name",
        metavar="NAME",
        help="What clients call the model.  [default: the folder's name]",
    ),
    _option(
        "--weights",
        type=click.Choice(["mmap", "copy"]),
        default="mmap",
        show_default=True,
        help="Map the file, shared with other processes, or copy it into memory.",
    ),
    _option(
        "--provider",
        metavar="NAME",
        help="What an onnx engine runs on: cpu, cuda or tensorrt-rtx.  [default: cpu]",
    ),
    _option(
        "--api-key",
        "api_key",
        metavar="KEY",
        multiple=True,
        help="Ask for this key; may be given several times (in the environment: separated by spaces).",
    ),
    _option(
        "--key-concurrency",
        metavar="N",
        type=click.IntRange(min=1),
        help="Requests of one key in flight at most.",
    ),
    _option(
        "--max-queue",
        metavar="N",
        type=click.IntRange(min=0),
        default=1024,
        show_default=True,
        help="Requests that wait at most; more are refused with 429.",
    ),
    _option(
        "--drain",
        metavar="SECONDS",
        type=_Seconds(min=0),
        default=30.0,
        show_default=True,
        help="Time for requests in flight after SIGTERM.",
    ),
    _option(
        "--stall",
        metavar="SECONDS",
        type=_Seconds(min=1),
        default=60.0,
        show_default=True,
        help="/health says 503 when no step has ended for so long.",
    ),
    _option("--log-prompts", is_flag=True, help="Write prompts and answers into the log."),
]


_DRAFTING = ("speculate", "draft_tokens", "draft_rule", "draft_kv_memory")


def _with_options(command: Any) -> Any:
    return functools.reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), command)


@click.command(short_help="Serve ENGINE over HTTP.")
@click.argument("path", metavar="ENGINE")
@_with_options
def serve(path: str, api_key: tuple[str, ...], **options: Any) -> None:
    """Serve ENGINE over HTTP: OpenAI's interfaces under /v1, a page at /, /metrics for Prometheus.

    Each option can also be set in the environment, as ENGINEWRIGHT_MAX_SEQUENCES, or in the file --config.
    """
    try:
        from enginewright.runtime.server.run import serve as run
        from enginewright.runtime.server.settings import Settings
    except ModuleNotFoundError as missing:
        raise InputError(
            f"serving over HTTP needs the package {missing.name!r}",
            action="pip install fastapi uvicorn prometheus-client llguidance httptools uvloop",
        ) from missing
    from enginewright.backends.artifact import open_engine
    from enginewright.runtime.drafters import check

    _warn_of_variables(click.get_current_context())
    if any(not key for key in api_key):
        raise InputError("an API key is empty", action="leave --api-key out to serve without keys")
    if any(key != key.strip() for key in api_key):
        raise InputError("an API key begins or ends with a space", expected="a key that a header can carry")
    # What is wrong with the folder, or cannot draft for it, is said before anything listens.
    check(open_engine(path), *(options[name] for name in _DRAFTING))
    code = run(Settings(engine=Path(path), api_keys=tuple(api_key), **options))
    if code:
        raise SystemExit(code)
