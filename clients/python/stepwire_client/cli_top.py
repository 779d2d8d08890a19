"""`stepwire top`: engines and frontends live, read from their metrics endpoints; no Prometheus, no Grafana."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from stepwire_client.monitor import samples, top_tables
from stepwire_client.monitor.samples import Change, Look

DEFAULT_ENDPOINTS = ("127.0.0.1:9100", "127.0.0.1:9101")
NUM_BARS = 60

Endpoints = Annotated[
    list[str] | None,
    typer.Argument(
        help=f"Metrics ports as host:port, of frontends and engines; default: {' '.join(DEFAULT_ENDPOINTS)}."
    ),
]
Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")]
Once = Annotated[
    bool, typer.Option("--once", help="Show one interval and end; exit 1 when an endpoint does not answer.")
]


def top(endpoints: Endpoints = None, interval: Interval = 2.0, once: Once = False) -> None:
    """Show engines, queues, KV cache, tokens a second and latency until Ctrl-C."""
    view, console = View(endpoints or list(DEFAULT_ENDPOINTS)), Console()
    view.look()
    try:
        if once:
            time.sleep(interval)
            view.look()
            console.print(view.render())
        else:
            _stay(view, console, interval)
    except KeyboardInterrupt:
        return
    if once and view.failures:
        raise typer.Exit(1)


def _stay(view: View, console: Console, interval: float) -> None:
    # Of another screen, as with top: the terminal looks afterwards as it did before.
    with Live(view.render(), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(interval)
            view.look()
            live.update(view.render(), refresh=True)


class View:
    """The last two looks at each endpoint, and those that did not answer."""

    def __init__(self, endpoints: list[str]) -> None:
        self._looks: dict[str, Look | None] = dict.fromkeys(endpoints)
        self._history: deque[float] = deque(maxlen=NUM_BARS)
        self.changes: dict[str, Change] = {}
        self.failures: dict[str, str] = {}

    def look(self) -> None:
        """Ask all endpoints again."""
        self.changes, self.failures = {}, {}
        for endpoint, before in self._looks.items():
            try:
                now = samples.look(endpoint)
            except (OSError, ValueError) as error:
                self.failures[endpoint] = f"no metrics: {error}"
                self._looks[endpoint] = None
            else:
                self.changes[endpoint] = Change(before, now)
                self._looks[endpoint] = now
        if any(change.before for change in self.changes.values()):
            self._history.append(top_tables.generation_rate(self.changes.values()))

    def render(self) -> RenderableType:
        """What there is to see now."""
        return top_tables.render(self.changes, self.failures, self._history)
