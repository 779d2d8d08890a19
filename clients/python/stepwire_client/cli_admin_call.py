"""What all sub-commands of `stepwire admin` do alike: the options of where and how long, the call, the table."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from stepwire.v1 import admin_service_pb2 as pb
from stepwire_client import cli_admin_tables, cli_credentials, cli_printing
from stepwire_client.admin_client import AdminClient
from stepwire_client.cli_session import FAILED, reported

Target = Annotated[str, typer.Option(help="host:port of the frontend's admin port.")]
Engines = Annotated[list[str] | None, typer.Option("--engine", help="Engine id; repeatable. None = all attached.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds until the engines answer that it took too long.")]
Json = Annotated[bool, typer.Option("--json", help="Write the response as JSON.")]

# Enough for anything but a pause that waits for long answers.
DEFAULT_TIMEOUT_S = 60.0


def run(method: str, request: Any, target: str, timeout: float, json: bool) -> None:
    """Make one call and show its response. Exit 1 when it, or an engine, failed."""
    with reported(target, timeout), AdminClient(target, credentials=cli_credentials.current()) as client:
        response = client.call(getattr(client.stub, method), request, timeout_s=timeout)
        if json:
            cli_printing.write_json(response)
        else:
            cli_admin_tables.print_response(response)
    if cli_admin_tables.has_errors(response):
        raise typer.Exit(FAILED)


def selector(engine_ids: list[str] | None) -> pb.EngineSelector:
    """The engines named with --engine."""
    return pb.EngineSelector(engine_ids=engine_ids or ())
