"""`make run` and `make demo`: prepare, start, show, stay, stop. Reads top-down.

Owner: the main thread alone. SIGINT and SIGTERM both raise KeyboardInterrupt in it, and `finally` stops the services.
"""

from __future__ import annotations

import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from launcher import options as command_line
from launcher import preflight, sample, services
from launcher.children import Child
from launcher.errors import LaunchError
from launcher.options import LaunchOptions
from stepwire import tracing
from stepwire.settings import Settings
from stepwire.startup_trace import StartupTrace
from stepwire_client import CallError, Client

INTERRUPTED = 130


def main() -> int:
    """Exit code: 0 after a demo or a wanted stop, 1 when something failed, 2 for a wrong flag, 130 when interrupted."""
    options = command_line.parse(sys.argv[1:])
    # SIGINT too: a shell starts background jobs with it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    console = Console(highlight=False)
    try:
        launch(options, console)
        return 0
    except (LaunchError, CallError) as error:
        Console(stderr=True, highlight=False).print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def launch(options: LaunchOptions, console: Console) -> None:
    """Start the services, show a sample, and stay unless it is a demo."""
    preflight.check_ports(options.ports())
    preflight.check_memory(preflight.NEEDED_BYTES * options.num_engines)
    services.prepare_model(options)
    started: list[Child] = []
    # By OpenTelemetry's variables alone: the flags are those of the services.
    end_tracing = tracing.start("stepwire-launcher", uuid.uuid4().hex, Settings.model_construct())
    startup_trace = StartupTrace()
    try:
        services.start_all(options, started, startup_trace.environment)
        _show(options, started, console, startup_trace)
        if not options.is_demo:
            with services.observed(options):
                _stay(options, started, console)
    finally:
        startup_trace.end(is_serving=False)
        with _step("Stopping", console):
            problems = services.stop_all(started, options.stop_timeout_s)
        end_tracing()
    if problems:
        raise LaunchError("; ".join(problems))


def _show(options: LaunchOptions, started: list[Child], console: Console, startup_trace: StartupTrace) -> None:
    target = f"{preflight.HOST}:{options.frontend_port}"
    with Client(target) as client:
        with _step(_starting(options), console):
            services.wait_until_serving(client, started, options.ready_timeout_s)
        startup_trace.end(is_serving=True)
        sample.stream(client, options.prompt, console)
    if not options.is_demo:
        ports = (options.frontend_metrics_port, *options.engine_metrics_ports)
        metrics = [f"{preflight.HOST}:{port}" for port in ports]
        sample.print_next_steps(target, f"{preflight.HOST}:{options.frontend_admin_port}", metrics, console)


def _starting(options: LaunchOptions) -> str:
    engines = "engine core" if options.num_engines == 1 else f"{options.num_engines} engine cores"
    return f"Starting {engines} and frontend"


def _stay(options: LaunchOptions, started: list[Child], console: Console) -> None:
    def tell(text: str) -> None:
        console.print(text, style="yellow", markup=False)

    try:
        services.watch(started, lambda place: services.revived_engine(options, started, place, tell))
    except KeyboardInterrupt:
        console.print()


@contextmanager
def _step(text: str, console: Console) -> Iterator[None]:
    """A spinner on a terminal, a line elsewhere; then how long it took."""
    start = time.monotonic()
    if not console.is_terminal:
        console.print(f"{text} …")
    with console.status(text):
        yield
    console.print(f"{text}: {time.monotonic() - start:.1f} s", style="dim")


if __name__ == "__main__":
    sys.exit(main())
