"""One command's use of a server: the connection, and every failure on it as one sentence and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from stepwire_client import cli_credentials, cli_printing
from stepwire_client.client import Client
from stepwire_client.errors import CallError

FAILED = 1
INTERRUPTED = 130


@contextmanager
def connected(target: str, timeout_s: float | None = None, client_class: str = "") -> Iterator[Client]:
    """A client for the body; `timeout_s` is what the user gave, for the message when it has passed."""
    with reported(target, timeout_s), _client(target, client_class) as client:
        yield client


def _client(target: str, client_class: str) -> Client:
    return Client(target, client_class=client_class, credentials=cli_credentials.current())


@contextmanager
def reported(target: str, timeout_s: float | None = None) -> Iterator[None]:
    """Failures of the body as the user sees them, whatever client it uses."""
    try:
        yield
    except CallError as error:
        cli_printing.print_error(error, target, timeout_s)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt:
        # Leaving the stream has cancelled the call; the server has freed the request by now.
        cli_printing.note("\ninterrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of a pipe has enough, as with `| head`: typer ends quietly.
        raise
    except (OSError, UnicodeError) as error:
        # Input has been read by `cli_input`, so this is the output: a full disk, a terminal that lacks the character.
        cli_printing.note(f"error: the answer cannot be written: {error}", style="bold red")
        raise typer.Exit(FAILED) from error
