"""`stepwire bench`: load on a server, and what it made of it. Exit 1 when any request failed."""

from __future__ import annotations

import asyncio
import json as json_format
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import typer

from stepwire_client import cli_bench_options as opt
from stepwire_client import cli_bench_table, cli_credentials, cli_options, cli_printing
from stepwire_client.cli_session import FAILED, connected, reported
from stepwire_client.credentials import Credentials
from stepwire_client.load import plan as load_plan
from stepwire_client.load.grpc_target import GrpcTarget
from stepwire_client.load.plan import Plan
from stepwire_client.load.reply import RequestFailed, Target
from stepwire_client.load.summary import Row, summarize
from stepwire_client.load.workload import MIN_VOCAB_SIZE, Lengths, from_prompts, read_prompts, synthetic
from stepwire_client.short_calls import DEFAULT_TARGET

_WARM_UP_ANSWER = Lengths(8, 8)


def bench(
    target: cli_options.Target = DEFAULT_TARGET,
    url: opt.Url = "",
    model: cli_options.Model = "",
    concurrency: opt.Concurrency = "",
    rate: opt.Rate = "",
    num_requests: opt.NumRequests = 0,
    repetitions: opt.Repetitions = 1,
    repeat_requests: opt.RepeatRequests = False,
    warm_up: opt.WarmUp = 1,
    timeout: opt.RequestTimeout = opt.DEFAULT_TIMEOUT_S,
    input_len: opt.InputLen = "64",
    output_len: opt.OutputLen = "128",
    shared_prefix_len: opt.SharedPrefixLen = 0,
    prompts: opt.Prompts = None,
    kind: opt.Kind = "short",
    first_prompt: opt.FirstPrompt = 0,
    vocab_size: opt.VocabSize = 0,
    ignore_eos: opt.IgnoreEos = True,
    seed: opt.Seed = 0,
    label: opt.Label = "",
    json: opt.Json = False,
) -> None:
    """Send greedy requests at a fixed concurrency or rate; show tokens/s, TTFT, ITL, E2E and failures.

    Times and tokens are those of complete answers; every other request has failed and is counted by reason. With
    --rate times count from the moment the request was due.
    """
    loads, input_lengths, output_lengths = opt.loads(concurrency, rate), opt.lengths(input_len), opt.lengths(output_len)
    if shared_prefix_len >= input_lengths.low and prompts is None:
        raise typer.BadParameter("--shared-prefix-len must be below --input-len: each prompt has an end of its own")
    given = None if prompts is None else _read(prompts, kind)
    vocab_size = vocab_size or (opt.DEFAULT_VOCAB_SIZE if url else _vocab_size(target, model))
    if vocab_size < MIN_VOCAB_SIZE:
        raise typer.BadParameter(f"--vocab-size {vocab_size}: random prompts need at least {MIN_VOCAB_SIZE}")
    if given is None:
        requests = synthetic(input_lengths, output_lengths, shared_prefix_len, vocab_size, str(seed))
    else:
        requests = from_prompts(given, output_lengths, first_prompt, str(seed))
    # Not those that are measured: the prefix cache would have them.
    warm_ups = synthetic(input_lengths, _WARM_UP_ANSWER, 0, vocab_size, f"warm-up {seed}")
    plan = Plan(loads, requests, list(islice(warm_ups, warm_up)), num_requests, repetitions, repeat_requests, seed)
    make_target = partial(_http_target if url else GrpcTarget, url or target)
    connect = partial(
        make_target, model=model, ignore_eos=ignore_eos, timeout_s=timeout, credentials=cli_credentials.current()
    )
    names: Row = {"label": label or url or target, "kind": "random" if given is None else kind}
    with reported(target, timeout):
        _report(asyncio.run(_measure(plan, connect, names, writes_lines=json)), is_shown=not json)


def _read(path: Path, kind: str) -> list[list[int]]:
    try:
        return read_prompts(path, kind)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _vocab_size(target: str, model: str) -> int:
    with connected(target) as client:
        sizes = [served.vocab_size for served in client.models() if model in {"", served.id}]
    if not sizes:
        raise typer.BadParameter(f"the server has no model {model!r}")
    return sizes[0]


def _http_target(url: str, *, model: str, ignore_eos: bool, timeout_s: float, credentials: Credentials) -> Target:
    try:
        from stepwire_client.load.http_target import HttpTarget
    except ImportError as error:
        raise typer.BadParameter(f"--url needs {error.name}: pip install 'stepwire[bench]'") from error
    return HttpTarget(url, model=model, ignore_eos=ignore_eos, timeout_s=timeout_s, credentials=credentials)


async def _measure(plan: Plan, connect: Callable[[], Target], names: Row, *, writes_lines: bool) -> list[Row]:
    target, rows = connect(), []
    try:
        async for load, repetition, result in load_plan.run(plan, target):
            place: Row = {"concurrency": load.concurrency, "rate": load.rate, "rep": repetition}
            rows.append({**names, **place, **summarize(result)})
            if writes_lines:
                sys.stdout.write(json_format.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
    except RequestFailed as failure:
        cli_printing.note(f"error: the warm-up failed: {failure.reason}: {failure}", style="bold red")
        raise typer.Exit(FAILED) from failure
    finally:
        await target.close()
    return rows


def _report(rows: list[Row], *, is_shown: bool) -> None:
    if is_shown:
        cli_bench_table.show(rows)
    num_failed = sum(bool(row["failed"]) for row in rows)
    if num_failed:
        cli_printing.note(f"error: requests failed in {num_failed} of {len(rows)} measurements", style="bold red")
        raise typer.Exit(FAILED)
