"""The structured-output options of `stepwire generate` -> StructuredOutput. At most one may be given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from stepwire.v1 import common_pb2

_NAMES = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")


def build(options: Mapping[str, Any]) -> common_pb2.StructuredOutput | None:
    """The constraint, or None without one. `options` are the parameters of the command by name."""
    given = [name for name in _NAMES if options[name] or options[name] == ""]
    if not given:
        return None
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise typer.BadParameter(f"{flags}: only one constraint is possible")
    value = options[given[0]]
    match given[0]:
        case "json_schema":
            return common_pb2.StructuredOutput(json_schema=read_schema(value))
        case "json_object":
            return common_pb2.StructuredOutput(json_object=common_pb2.StructuredOutput.JsonObject())
        case "choice":
            return common_pb2.StructuredOutput(choice=common_pb2.StructuredOutput.Choice(choices=value))
        case "regex":
            return common_pb2.StructuredOutput(regex=value)
        case "grammar":
            return common_pb2.StructuredOutput(grammar=_read(value))
        case _:
            return common_pb2.StructuredOutput(structural_tag=_read(value))


def read_schema(value: str) -> str:
    """The schema itself, or a file with it. A schema is an object or a boolean, which is no likely file name."""
    if value.lstrip().startswith("{") or value.strip() in ("true", "false"):
        return value
    path = Path(value)
    if not path.is_file():
        raise typer.BadParameter(f"--json-schema: {value!r} is neither a JSON object nor a file")
    return _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} can not be read: {error}") from error
