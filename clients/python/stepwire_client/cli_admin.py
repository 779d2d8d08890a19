"""`stepwire admin`: one sub-command for each operation of AdminService. Exit 1 when the call, or an engine, failed."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from stepwire.v1 import admin_service_pb2 as pb
from stepwire.v1 import control_pb2 as control
from stepwire_client import cli_admin_weights
from stepwire_client.admin_client import DEFAULT_ADMIN_TARGET
from stepwire_client.cli_admin_call import DEFAULT_TIMEOUT_S, Engines, Json, Target, Timeout, run, selector

app = typer.Typer(help="Operations on a frontend and its engines; talks to the admin port.", no_args_is_help=True)
app.add_typer(cli_admin_weights.app)


class Mode(enum.Enum):
    """What a pause does with the requests in the engine."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Level(enum.Enum):
    """How much a sleep gives back."""

    PAUSE_ONLY = "pause-only"
    OFFLOAD_WEIGHTS = "offload-weights"
    DISCARD_ALL = "discard-all"


class Tag(enum.Enum):
    """A part that sleeps."""

    WEIGHTS = "weights"
    KV_CACHE = "kv-cache"
    SCHEDULING = "scheduling"


PauseMode = Annotated[Mode, typer.Option(help="abort ends requests, wait lets running ones finish, keep freezes.")]
ClearCache = Annotated[bool, typer.Option("--clear-cache", help="Afterwards forget the prefix cache.")]
SleepLevel = Annotated[Level, typer.Option(help="What is given back.")]
SleepMode = Annotated[Mode | None, typer.Option("--mode", help="How to pause; unset = the engines are paused.")]
Tags = Annotated[list[Tag] | None, typer.Option("--tag", help="Part to bring back; repeatable. None = all.")]
ResetRunning = Annotated[bool, typer.Option("--reset-running-requests", help="Preempt and recompute what runs.")]
NumSteps = Annotated[int, typer.Option(min=0, help="Stop by itself after so many steps; 0 = stop-profile does.")]
Prefix = Annotated[str, typer.Option(help="Start of the file's name.")]
Requests = Annotated[bool, typer.Option("--requests", help="List every request.")]
Stacks = Annotated[bool, typer.Option("--stacks", help="Show the stacks of all threads.")]
DrainTimeout = Annotated[float, typer.Option(min=0, help="Seconds for running requests; 0 = the configured time.")]
DrainEngines = Annotated[bool, typer.Option("--include-engines", help="Also shut the engines down.")]
Reason = Annotated[str, typer.Option(help="For the logs.")]
LogLevel = Annotated[str, typer.Argument(help="DEBUG, INFO, WARNING, ERROR or CRITICAL.")]
Logger = Annotated[str, typer.Option(help="Name of a logger; empty = all.")]


@app.command()
def pause(
    mode: PauseMode = Mode.WAIT,
    clear_cache: ClearCache = False,
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Stop scheduling; returns when the engines are idle in the sense of the mode."""
    args = control.PauseArgs(mode=_mode(mode), clear_cache=clear_cache)
    run("Pause", pb.PauseRequest(engines=selector(engine), args=args), target, timeout, json)


@app.command()
def resume(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Schedule again."""
    run("Resume", pb.ResumeRequest(engines=selector(engine)), target, timeout, json)


@app.command()
def is_paused(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show the pause state."""
    run("IsPaused", pb.IsPausedRequest(engines=selector(engine)), target, timeout, json)


@app.command()
def sleep(
    level: SleepLevel = Level.OFFLOAD_WEIGHTS,
    mode: SleepMode = None,
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Pause, and give device memory back."""
    args = control.SleepArgs(level=control.SleepLevel.Value(f"SLEEP_LEVEL_{level.name}"))
    if mode is not None:
        args.pause_mode = _mode(mode)
    run("Sleep", pb.SleepRequest(engines=selector(engine), args=args), target, timeout, json)


@app.command()
def wake_up(
    tag: Tags = None,
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Bring back what sleeps."""
    args = control.WakeUpArgs(tags=[control.WakeTag.Value(f"WAKE_TAG_{one.name}") for one in tag or ()])
    run("WakeUp", pb.WakeUpRequest(engines=selector(engine), args=args), target, timeout, json)


@app.command()
def is_sleeping(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show what sleeps."""
    run("IsSleeping", pb.IsSleepingRequest(engines=selector(engine)), target, timeout, json)


@app.command()
def reset_prefix_cache(
    reset_running_requests: ResetRunning = False,
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Forget all cached prefixes."""
    args = control.ResetPrefixCacheArgs(reset_running_requests=reset_running_requests)
    request = pb.ResetPrefixCacheRequest(engines=selector(engine), args=args)
    run("ResetPrefixCache", request, target, timeout, json)


@app.command()
def reset_encoder_cache(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Forget cached inputs of other kinds than text; models of text have none."""
    args = control.ResetEncoderCacheArgs(input_cache=True, encoder_cache=True)
    request = pb.ResetEncoderCacheRequest(engines=selector(engine), args=args)
    run("ResetEncoderCache", request, target, timeout, json)


@app.command()
def start_profile(
    num_steps: NumSteps = 0,
    prefix: Prefix = "",
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Record what the engines do; needs their --profile-dir."""
    args = control.StartProfileArgs(num_steps=num_steps, prefix=prefix)
    run("StartProfile", pb.StartProfileRequest(engines=selector(engine), args=args), target, timeout, json)


@app.command()
def stop_profile(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Write the profile, on the engines' machines."""
    run("StopProfile", pb.StopProfileRequest(engines=selector(engine)), target, timeout, json)


@app.command()
def dump_state(
    requests: Requests = False,
    stacks: Stacks = False,
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show blocks, queues and broken invariants; never what is in a prompt."""
    args = control.DumpStateArgs(include_requests=requests, include_stacks=stacks)
    run("DumpState", pb.DumpStateRequest(engines=selector(engine), args=args), target, timeout, json)


@app.command()
def check_health(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Ask every worker of the engines."""
    run("CheckHealth", pb.CheckHealthRequest(engines=selector(engine)), target, timeout, json)


@app.command()
def get_supported_tasks(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """List what the model can do."""
    run("GetSupportedTasks", pb.GetSupportedTasksRequest(engines=selector(engine)), target, timeout, json)


@app.command()
def get_kv_cache_metadata(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show how the KV cache is laid out."""
    run("GetKvCacheMetadata", pb.GetKvCacheMetadataRequest(engines=selector(engine)), target, timeout, json)


@app.command()
def drain(
    drain_timeout: DrainTimeout = 0.0,
    include_engines: DrainEngines = False,
    reason: Reason = "",
    target: Target = DEFAULT_ADMIN_TARGET,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Refuse new requests at this frontend; running ones finish. Not to be undone but by a restart."""
    timeout_ms = round(drain_timeout * 1000)
    request = pb.DrainRequest(timeout_ms=timeout_ms, include_engines=include_engines, reason=reason)
    run("Drain", request, target, timeout, json)


@app.command()
def drain_status(
    target: Target = DEFAULT_ADMIN_TARGET, timeout: Timeout = DEFAULT_TIMEOUT_S, json: Json = False
) -> None:
    """Show how far a drain is."""
    run("GetDrainStatus", pb.GetDrainStatusRequest(), target, timeout, json)


@app.command()
def set_log_level(
    level: LogLevel,
    logger: Logger = "",
    target: Target = DEFAULT_ADMIN_TARGET,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Change what this frontend logs, until its next start."""
    run("SetLogLevel", pb.SetLogLevelRequest(logger=logger, level=level), target, timeout, json)


def _mode(mode: Mode) -> control.PauseMode.ValueType:
    return control.PauseMode.Value(f"PAUSE_MODE_{mode.name}")
