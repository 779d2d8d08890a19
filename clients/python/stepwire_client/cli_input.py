"""What a user hands to the CLI: words, standard input, files. What cannot be read is wrong usage, in one sentence.

Never talks to a server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import typer


def text(value: str) -> str:
    """Parser of text options. Python lets bytes that are no UTF-8 through, but no message can carry them."""
    with _usage_errors("the value"):
        value.encode()
    return value


def header(value: str) -> str:
    """Parser of what travels in gRPC metadata."""
    if not (value.isascii() and value.isprintable()):
        raise typer.BadParameter(f"{value!r} has characters other than printable ASCII")
    return value


def read_stdin(missing: str) -> str:
    """All of standard input; `missing` says what to do when that is a terminal, where it would wait unseen."""
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter(missing)
    with _usage_errors("standard input"):
        content = sys.stdin.read()
        # In a C locale undecodable bytes get through the read.
        content.encode()
    return content


def read_file(path: Path) -> str:
    """All of a text file."""
    with _usage_errors(str(path)):
        return path.read_text(encoding="utf-8")


def open_output(path: Path) -> TextIO:
    """A file for answers; what it held is gone."""
    with _usage_errors(str(path)):
        return path.open("w", encoding="utf-8")


@contextmanager
def _usage_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{what}: {error.strerror}") from error
    except UnicodeError as error:
        raise typer.BadParameter(f"{what} is not UTF-8 text") from error
