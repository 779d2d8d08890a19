"""`stepwire report`: every panel of the dashboards over a span of time, as one HTML file, from a Prometheus server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from stepwire_client import cli_printing
from stepwire_client.cli_session import FAILED
from stepwire_client.monitor import report
from stepwire_client.monitor.boards import BOARDS
from stepwire_client.monitor.prometheus import Prometheus, PrometheusError, Span, parse_duration

DEFAULT_URL = "http://127.0.0.1:9090"
# Of a chart: more would not be seen.
NUM_POINTS = 180

Url = Annotated[str, typer.Option("--prometheus", help="Address of the Prometheus server; `make observe` starts one.")]
Last = Annotated[str, typer.Option(help="Length of the span, which ends now unless --end is given: 15m, 6h, 2d.")]
End = Annotated[float, typer.Option(help="End of the span in unix seconds; 0 = now.")]
Output = Annotated[Path, typer.Option(dir_okay=False, help="The HTML file to write.")]
Models = Annotated[str, typer.Option("--model", help="Regular expression: only these models.")]
Engines = Annotated[str, typer.Option("--engine", help="Regular expression: only these engine ids.")]
Frontends = Annotated[str, typer.Option("--frontend", help="Regular expression: only these frontends (instances).")]


def report_command(
    prometheus: Url = DEFAULT_URL,
    last: Last = "15m",
    end: End = 0.0,
    output: Output = Path("stepwire-report.html"),
    model: Models = ".*",
    engine: Engines = ".*",
    frontend: Frontends = ".*",
) -> None:
    """Write a page with all graphs of the last minutes, hours or days, which needs no Grafana to be read."""
    span = _span(last, end)
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("Asking Prometheus", total=sum(len(list(board.panels())) for board in BOARDS))
            page = report.collect(
                Prometheus(prometheus),
                prometheus,
                span,
                report.Choice(model, engine, frontend),
                lambda: progress.advance(task),
            )
        output.write_text(page, encoding="utf-8")
    except PrometheusError as error:
        cli_printing.note(f"error: {error}", style="bold red")
        raise typer.Exit(FAILED) from error
    except OSError as error:
        cli_printing.note(f"error: the report cannot be written: {error}", style="bold red")
        raise typer.Exit(FAILED) from error
    cli_printing.write_text(f"{output}\n")


def _span(last: str, end: float) -> Span:
    try:
        length_s = parse_duration(last)
    except ValueError as error:
        raise typer.BadParameter(f"--last {error}") from error
    end_s = end or time.time()
    return Span(end_s - length_s, end_s, max(1.0, length_s / NUM_POINTS))
