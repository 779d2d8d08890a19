"""The sub-commands of `stepwire admin` that change weights. Tensors by value are for programs, not for terminals."""

from __future__ import annotations

from typing import Annotated

import typer

from stepwire.v1 import admin_service_pb2 as pb
from stepwire.v1 import control_pb2 as control
from stepwire_client.admin_client import DEFAULT_ADMIN_TARGET
from stepwire_client.cli_admin_call import DEFAULT_TIMEOUT_S, Engines, Json, Target, Timeout, run, selector

app = typer.Typer()

# Loading many gigabytes takes minutes.
LOAD_TIMEOUT_S = 600.0

Version = Annotated[str, typer.Argument(help="Version that the weights will have.")]
UpdateId = Annotated[str, typer.Argument(help="Id that start-weight-update has shown.")]
ReloadPath = Annotated[str, typer.Option("--path", help="Directory on the engines' machines; empty = the model's own.")]
UpdatePath = Annotated[str, typer.Option("--path", help="Directory on the engines' machines, below --trusted-dirs.")]
Discard = Annotated[bool, typer.Option("--discard", help="Drop what is staged and keep the old weights.")]


@app.command()
def reload_weights(
    path: ReloadPath = "",
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = LOAD_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Load all weights from disk into paused engines."""
    request = pb.ReloadWeightsRequest(engines=selector(engine), args=control.ReloadWeightsArgs(path=path))
    run("ReloadWeights", request, target, timeout, json)


@app.command()
def weight_version(
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Show the version of the weights in force."""
    run("GetWeightVersion", pb.GetWeightVersionRequest(engines=selector(engine)), target, timeout, json)


@app.command()
def start_weight_update(
    version: Version,
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Open an update of some or all weights of paused engines."""
    args = control.StartWeightUpdateArgs(version=version)
    run("StartWeightUpdate", pb.StartWeightUpdateRequest(engines=selector(engine), args=args), target, timeout, json)


@app.command()
def update_weights(
    update_id: UpdateId,
    path: UpdatePath,
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = LOAD_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Stage all tensors of a directory; they have no effect before the finish."""
    args = control.UpdateWeightsArgs(update_id=update_id, path=path)
    run("UpdateWeights", pb.UpdateWeightsRequest(engines=selector(engine), args=args), target, timeout, json)


@app.command()
def finish_weight_update(
    update_id: UpdateId,
    discard: Discard = False,
    target: Target = DEFAULT_ADMIN_TARGET,
    engine: Engines = None,
    timeout: Timeout = LOAD_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Put the staged weights in force, and forget the prefix cache."""
    args = control.FinishWeightUpdateArgs(update_id=update_id, discard=discard)
    run("FinishWeightUpdate", pb.FinishWeightUpdateRequest(engines=selector(engine), args=args), target, timeout, json)
