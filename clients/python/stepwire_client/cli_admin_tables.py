"""Responses of AdminService as tables: one row an engine, one column a field, whatever the operation.

A field that is a list of messages becomes a table of its own below. Knows no operation by name.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from stepwire_client import cli_printing

Rows = list[tuple[str, Any]]


def has_errors(response: Any) -> bool:
    """Whether an engine has failed; drains and log levels have no engines."""
    return bool(getattr(response, "errors", None))


def print_response(response: Any) -> None:
    """Results on standard output, errors on standard error."""
    if not hasattr(response, "results"):
        _print_table([("", response)], has_engines=False)
        return
    if response.results:
        _print_table(sorted(response.results.items()), has_engines=True)
    for engine_id, error in sorted(response.errors.items()):
        cli_printing.note(f"error: engine {engine_id}: {error.reason}: {error.message}", style="bold red")


def _print_table(rows: Rows, *, has_engines: bool) -> None:
    fields = rows[0][1].DESCRIPTOR.fields
    flat = [field for field in fields if not _is_nested(field) and not _is_long(field)]
    table = Table(*(["engine"] if has_engines else []), *(Column(_title(field), overflow="fold") for field in flat))
    for engine_id, message in rows:
        cells = [Text(_text(field, getattr(message, field.name))) for field in flat]
        table.add_row(*([Text(engine_id)] if has_engines else []), *cells)
    # An operation whose result has nothing to say still says which engines have done it.
    if flat or has_engines:
        Console().print(table)
    for field in fields:
        if _is_nested(field):
            _print_nested(field, rows)
        elif _is_long(field):
            _print_long(field, rows)


def _print_nested(field: FieldDescriptor, rows: Rows) -> None:
    entries = [(engine_id, entry) for engine_id, message in rows for entry in getattr(message, field.name)]
    if entries:
        Console().print(Text(_title(field), style="bold"))
        _print_table(entries, has_engines=True)


def _print_long(field: FieldDescriptor, rows: Rows) -> None:
    for engine_id, message in rows:
        text = getattr(message, field.name)
        if text:
            cli_printing.write_text(f"{_title(field)} of {engine_id}:\n{text}\n")


def _is_nested(field: FieldDescriptor) -> bool:
    return bool(field.type == FieldDescriptor.TYPE_MESSAGE)


def _is_long(field: FieldDescriptor) -> bool:
    # Stacks have lines, which no cell can hold.
    return bool(field.name.endswith("_stacks"))


def _title(field: FieldDescriptor) -> str:
    return str(field.name).replace("_", " ")


def _text(field: FieldDescriptor, value: Any) -> str:
    if isinstance(value, Message | str | bool):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if field.enum_type is not None:
        numbers = [value] if isinstance(value, int) else value
        return ", ".join(_enum_text(field.enum_type, number) for number in numbers) or "-"
    return str(value) if isinstance(value, int) else ", ".join(map(str, value)) or "-"


def _enum_text(enum: EnumDescriptor, number: int) -> str:
    value = enum.values_by_number.get(number)
    if value is None:
        return str(number)
    # PAUSE_MODE_KEEP of PauseMode: the prefix says what the column says already.
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    name = str(value.name).removeprefix(prefix).lower()
    return "-" if name == "unspecified" else name.replace("_", " ")
