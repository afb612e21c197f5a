"""`engine bench ENGINE --workload …`: the options, and the way from them to a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from enginewright.recipes.errors import InputError

__all__ = ["bench_workload", "refuse_workload_options", "workload_options"]

_WORKLOAD_ONLY = (
    "rate", "requests", "burst", "seed", "speed", "policy", "url", "api_key", "slo_ttft", "slo_itl", "max_sequences",
    "max_batch_tokens", "plot",
)  # fmt: skip
_SPEED_ONLY = ("batches", "repeat")
_IN_PROCESS_ONLY = (
    "policy", "threads", "weights", "provider", "speculate", "draft_tokens", "draft_rule", "max_sequences", "max_batch_tokens",
)  # fmt: skip
_MADE_UP_ONLY = ("rate", "burst", "seed", "prompt_tokens", "new_tokens")

_OPTIONS = [
    click.option(
        "--workload",
        metavar="FILE|poisson|burst|mixed",
        help="Play requests that arrive in time, and tell latencies and throughput.",
    ),
    click.option("--url", metavar="URL", help="Play them against a server of ENGINE, not in this process."),
    click.option("--api-key", metavar="KEY", envvar="ENGINEWRIGHT_API_KEY", help="The key that the server wants."),
    click.option("--requests", metavar="N", type=click.IntRange(min=1), default=64, show_default=True, help="So many."),
    click.option(
        "--rate", metavar="X", type=click.FloatRange(min=0, min_open=True), default=4.0, show_default=True,
        help="Requests a second, on average.",
    ),
    click.option(
        "--burst", metavar="N", type=click.IntRange(min=1), default=16, show_default=True,
        help="Requests that come at one moment (burst).",
    ),
    click.option(
        "--speed", metavar="X", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
        help="Play a FILE so many times faster.",
    ),
    click.option("--seed", metavar="N", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is made up."),
    click.option("--policy", metavar="A,B", help="Policies of the scheduler, each played in turn."),
    click.option("--max-sequences", metavar="N", type=click.IntRange(min=1), default=32, show_default=True,
                 help="Requests computed together."),
    click.option("--max-batch-tokens", metavar="N", type=click.IntRange(min=1), default=512, show_default=True,
                 help="Tokens computed in a step."),
    click.option(
        "--slo-ttft", metavar="MS", type=click.FloatRange(min=0), default=1000.0, show_default=True,
        help="A request is in time if its first token comes within so many ms …",
    ),
    click.option(
        "--slo-itl", metavar="MS", type=click.FloatRange(min=0), default=100.0, show_default=True,
        help="… and the others so many ms apart, on average.",
    ),
    click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Draw the latencies (.png)."),
]  # fmt: skip


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a played workload."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _refuse(context: click.Context, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(option.opts[0] for option in context.command.params if option.name == name)
            raise InputError(f"{option} means nothing here", found=why, action="leave it out")


def refuse_workload_options(context: click.Context) -> None:
    """Without --workload, name an option that only has a meaning with it."""
    _refuse(context, _WORKLOAD_ONLY, "no --workload")


def bench_workload(context: click.Context) -> None:
    """Play the workload that `context`'s options name, and print what was measured."""
    from enginewright.inspection import print_tables
    from enginewright.runtime.latency import figures, per_request
    from enginewright.runtime.policies import get_policy
    from enginewright.runtime.workload import WORKLOADS

    from .workload_report import check_plot, plot_workload, workload_table

    chosen = context.params
    name, url = chosen["workload"], chosen["url"]
    _refuse(context, _SPEED_ONLY, "--workload, which plays requests as they come")
    _refuse(context, _IN_PROCESS_ONLY if url else ("api_key",), "--url" if url else "no --url")
    _refuse(context, ("speed",) if name in WORKLOADS else _MADE_UP_ONLY, f"--workload {name}")
    if name != "burst":
        _refuse(context, ("burst",), f"--workload {name}")
    if chosen["plot"] is not None:
        check_plot(chosen["plot"])
    policies = [part.strip() for part in chosen["policy"].split(",")] if chosen["policy"] else [""]
    for policy in filter(None, policies):
        get_policy(policy)
    arrivals, model = _arrivals(context)
    played = []
    for policy in policies:
        with _progress(len(arrivals), policy or name) as told:
            played.append(
                (
                    policy,
                    _over_http(chosen, arrivals, told)
                    if url
                    else _in_process(chosen, policy, arrivals, told),
                )
            )
    count = f"{len(arrivals)} request{'' if len(arrivals) == 1 else 's'}"
    report: dict[str, Any] = {
        "title": ", ".join(
            [model, name if name in WORKLOADS else Path(name).name, count, *([url] if url else [])]
        ),
        "engine": str(chosen["path"]),
        "workload": {
            key: str(chosen[key])
            for key in ("workload", "url", "rate", "burst", "seed", "speed", "prompt_tokens", "new_tokens")
        },
        "runs": [
            {
                "policy": policy,
                "figures": figures(run, chosen["slo_ttft"], chosen["slo_itl"]),
                "requests": per_request(run),
            }
            for policy, run in played
        ],
    }
    if chosen["plot"] is not None:
        plot_workload(chosen["plot"], report["title"], played, chosen["slo_ttft"], chosen["slo_itl"])
    if chosen["as_json"]:
        click.echo(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print_tables([workload_table(report)])
    _report_failures(played)


def _report_failures(played: list[tuple[str, Any]]) -> None:
    """The first fault of each run, on stderr; if nothing at all was served, that is an error."""
    for policy, run in played:
        faults = [served.error for served in run.served if served.error is not None]
        if faults:
            which = f"{policy}: " if policy else ""
            click.echo(
                f"{which}{len(faults)} of {len(run.served)} requests failed; the first:\n{faults[0]}",
                err=True,
            )
        if len(faults) == len(run.served):
            raise InputError("no request of the workload was served", found=faults[0])


def _arrivals(context: click.Context) -> tuple[list[Any], str]:
    from enginewright.backends.artifact import open_engine
    from enginewright.runtime.workload import Traffic, make_workload

    chosen = context.params
    artifact = open_engine(chosen["path"])
    model = artifact.manifest["model"]
    given = context.get_parameter_source("requests") is ParameterSource.COMMANDLINE
    traffic = Traffic(
        requests=chosen["requests"],
        rate=chosen["rate"],
        burst=chosen["burst"],
        speed=chosen["speed"],
        seed=chosen["seed"],
        **{
            field: chosen[name]
            for field, name in (("prompt", "prompt_tokens"), ("new", "new_tokens"))
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        },
    )
    arrivals = make_workload(
        chosen["workload"],
        traffic,
        vocab_size=model["vocab_size"],
        max_context=model["max_context"],
        all_of_file=not given,
    )
    return arrivals, artifact.path.name


def _in_process(chosen: dict[str, Any], policy: str, arrivals: list[Any], told: Callable[[int], None]) -> Any:
    from enginewright.runtime.engine import load
    from enginewright.runtime.traffic import play_in_process

    options: dict[str, Any] = {"policy": policy} if policy else {}
    with load(
        chosen["path"],
        threads=chosen["threads"],
        weights=chosen["weights"],
        provider=chosen["provider"],
        max_sequences=chosen["max_sequences"],
        token_budget=chosen["max_batch_tokens"],
        speculate=chosen["speculate"],
        draft_tokens=chosen["draft_tokens"],
        draft_rule=chosen["draft_rule"],
        **options,
    ) as engine:
        engine.generate([[1] * 8], max_tokens=2, ignore_eos=True)  # first touches of weights and cache
        return play_in_process(engine, arrivals, told)


def _over_http(chosen: dict[str, Any], arrivals: list[Any], told: Callable[[int], None]) -> Any:
    from enginewright.runtime.traffic import play_over_http

    return play_over_http(chosen["url"], arrivals, chosen["api_key"], told)


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A line on stderr with how many requests have ended, where somebody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda finished: None
        return
    with console.status(f"{what}: 0 of {total} requests") as status:
        yield lambda finished: status.update(f"{what}: {finished} of {total} requests")


class LengthsType(click.ParamType):
    """N, or LOW:HIGH."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from enginewright.runtime.workload import Lengths

        if isinstance(value, Lengths):
            return value
        try:
            return Lengths.parse(str(value))
        except ValueError:
            self.fail(f"{value!r} is neither a number of at least 1 nor LOW:HIGH", param, ctx)
