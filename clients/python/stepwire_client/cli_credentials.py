"""Options of every `stepwire` command, before its name: the token, and TLS."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

from stepwire_client.credentials import NO_CREDENTIALS, Credentials, read_token

# typer has no public way to ask for the command that runs.
_current: ContextVar[Credentials] = ContextVar("credentials", default=NO_CREDENTIALS)

TokenOption = Annotated[
    str,
    typer.Option(
        "--token",
        envvar="STEPWIRE_TOKEN",
        show_default=False,
        help="Bearer token. Others on this machine see it on a command line: prefer the variable or a file.",
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Instead of --token: a file with the token alone.")
]
TlsCaFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="PEM: CAs of the server; any TLS option turns TLS on."),
]
TlsCertFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="PEM: our certificate, for servers that want one.")
]
TlsKeyFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM: its key.")]


def remember(
    token: TokenOption = "",
    token_file: TokenFile = None,
    tls_ca_file: TlsCaFile = None,
    tls_cert_file: TlsCertFile = None,
    tls_key_file: TlsKeyFile = None,
) -> None:
    """Command-line client of a stepwire server."""
    try:
        # A file that is named on the command line wins over a variable of the environment.
        given = read_token(token_file) if token_file is not None else token
        _current.set(Credentials(given, tls_ca_file, tls_cert_file, tls_key_file))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def current() -> Credentials:
    """Those of the command that runs."""
    return _current.get()
