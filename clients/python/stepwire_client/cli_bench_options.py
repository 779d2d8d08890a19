"""The options of `stepwire bench`, and how lists and ranges among them are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepwire_client.load.plan import DEFAULT_OPEN_REQUESTS, Load
from stepwire_client.load.workload import Lengths

DEFAULT_CONCURRENCY = "8"
# Most models know more; over HTTP nobody can be asked.
DEFAULT_VOCAB_SIZE = 30_000
DEFAULT_TIMEOUT_S = 300.0

_LOAD = "Load"
_WORKLOAD = "Requests"

Url = Annotated[
    str, typer.Option(help="http://host:port of an OpenAI-compatible server, instead of --target; needs aiohttp.")
]
RequestTimeout = Annotated[float, typer.Option(min=0.001, help="Seconds until a request has failed.")]
Label = Annotated[str, typer.Option(help="Name of the measurement in its output; empty = the server's address.")]
Json = Annotated[bool, typer.Option("--json", help="Write a JSON line for each measurement as it ends.")]

Concurrency = Annotated[
    str,
    typer.Option(
        show_default=DEFAULT_CONCURRENCY,
        help="Requests in flight at once; a list like 1,8,32 measures each.",
        rich_help_panel=_LOAD,
    ),
]
Rate = Annotated[
    str,
    typer.Option(help="Instead: requests a second, at random times (Poisson); may be a list.", rich_help_panel=_LOAD),
]
NumRequests = Annotated[
    int,
    typer.Option(
        min=0,
        help=f"Requests of a measurement; 0 = as many as --concurrency, {DEFAULT_OPEN_REQUESTS} with --rate.",
        rich_help_panel=_LOAD,
    ),
]
Repetitions = Annotated[int, typer.Option(min=1, help="Measure each load so often.", rich_help_panel=_LOAD)]
RepeatRequests = Annotated[
    bool,
    typer.Option(
        "--repeat-requests",
        help="Repetitions send the same requests again, for the server to find in its prefix cache.",
        rich_help_panel=_LOAD,
    ),
]
WarmUp = Annotated[int, typer.Option(min=0, help="Short requests before, which do not count.", rich_help_panel=_LOAD)]

InputLen = Annotated[str, typer.Option(help="Prompt tokens, or a range like 16:1500.", rich_help_panel=_WORKLOAD)]
OutputLen = Annotated[str, typer.Option(help="Answer tokens, or a range like 8:256.", rich_help_panel=_WORKLOAD)]
SharedPrefixLen = Annotated[
    int,
    typer.Option(min=0, help="Tokens that all prompts begin with; part of --input-len.", rich_help_panel=_WORKLOAD),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Instead of random prompts: a JSON object with, for each kind, a list of lists of token ids, or an object "
        "of their `shared` beginning and the list of their `own` ends.",
        rich_help_panel=_WORKLOAD,
    ),
]
Kind = Annotated[str, typer.Option(help="With --prompts: which of the file's prompts.", rich_help_panel=_WORKLOAD)]
FirstPrompt = Annotated[
    int,
    typer.Option(min=0, help="With --prompts: begin here, behind what is in the cache.", rich_help_panel=_WORKLOAD),
]
VocabSize = Annotated[
    int,
    typer.Option(
        min=0,
        help=f"Random prompts use ids below it; 0 = ask the server, {DEFAULT_VOCAB_SIZE} over HTTP.",
        rich_help_panel=_WORKLOAD,
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option(help="Give every answer its full length, so that runs compare.", rich_help_panel=_WORKLOAD)
]
Seed = Annotated[int, typer.Option(help="Of random prompts, lengths and arrival times.", rich_help_panel=_WORKLOAD)]


def lengths(text: str) -> Lengths:
    """`64` or `16:1500`."""
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def loads(concurrency: str, rate: str) -> list[Load]:
    """One load for each number of the list that was given."""
    if concurrency and rate:
        raise typer.BadParameter("--concurrency and --rate exclude each other")
    try:
        if rate:
            found = [Load(rate=float(part)) for part in rate.split(",")]
        else:
            found = [Load(concurrency=int(part)) for part in (concurrency or DEFAULT_CONCURRENCY).split(",")]
    except ValueError as error:
        raise typer.BadParameter("--concurrency takes whole numbers, --rate numbers; a list like 1,8,32") from error
    if any(load.concurrency <= 0 and not 0 < load.rate < float("inf") for load in found):
        raise typer.BadParameter("--concurrency and --rate must be above 0")
    return found
