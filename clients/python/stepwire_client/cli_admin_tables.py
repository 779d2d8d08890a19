"""Responses of AdminService as tables: one row an engine, one column a field, whatever the operation.

Results with many fields are turned: one row a field. A field that is a list of messages becomes a table of its own
below. Knows no operation by name.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from stepwire_client import cli_printing

Rows = list[tuple[str, Any]]
Fields = list[FieldDescriptor]

MAX_COLUMNS = 6
# Of a table that the terminal has to wrap, because its columns can not be narrower without breaking ids.
MAX_WIDTH = 160


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


def _row_for_each(rows: Rows, fields: Fields, *, has_engines: bool) -> Table:
    engine = [Column("engine", no_wrap=True)] if has_engines else []
    table = Table(*engine, *(Column(_title(field), overflow="fold") for field in fields))
    for engine_id, message in rows:
        cells = [Text(_text(field, getattr(message, field.name))) for field in fields]
        table.add_row(*([Text(engine_id)] if has_engines else []), *cells)
    return table


def _turned(rows: Rows, fields: Fields) -> Table:
    """One row a field and one column an engine: for results with more fields than a terminal has room for."""
    table = Table("", *(Column(Text(engine_id), overflow="fold") for engine_id, _ in rows))
    for field in fields:
        table.add_row(_title(field), *(Text(_text(field, getattr(message, field.name))) for _, message in rows))
    return table


def _print(table: Table) -> None:
    """Wider than the terminal rather than with broken words."""
    console = Console()
    unbounded = console.options.update(max_width=MAX_WIDTH)
    console.width = max(console.width, Measurement.get(console, unbounded, table).maximum)
    console.print(table)


def _print_table(rows: Rows, *, has_engines: bool, is_nested: bool = False) -> None:
    fields = rows[0][1].DESCRIPTOR.fields
    flat = [field for field in fields if not _is_nested(field) and not _is_long(field)]
    # An operation whose result has nothing to say still says which engines have done it.
    if len(flat) > MAX_COLUMNS and not is_nested:
        _print(_turned(rows, flat))
    elif flat or has_engines:
        _print(_row_for_each(rows, flat, has_engines=has_engines))
    for field in fields:
        if _is_nested(field):
            _print_nested(field, rows)
        elif _is_long(field):
            _print_long(field, rows)


def _print_nested(field: FieldDescriptor, rows: Rows) -> None:
    entries = [(engine_id, entry) for engine_id, message in rows for entry in getattr(message, field.name)]
    if entries:
        Console().print(Text(_title(field), style="bold"))
        _print_table(entries, has_engines=True, is_nested=True)


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
