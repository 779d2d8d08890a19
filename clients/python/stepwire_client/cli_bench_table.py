"""The measurements of `stepwire bench` for people: throughput, times, and what failed and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Column, Table

from stepwire_client.load.summary import Row

_TIMES = {"TTFT ms": "ttft", "ITL ms": "itl", "E2E ms": "e2e"}
_FIGURES = ("mean", "p50", "p90", "p99")


def show(rows: Sequence[Row]) -> None:
    """Two tables with a line, or three, for each measurement, on standard output."""
    console = Console(highlight=False)
    console.print(_throughput(rows))
    console.print(_times(rows))
    for row in rows:
        errors = row["errors"]
        if isinstance(errors, Mapping) and errors:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in errors.items())
            text = f"{_load(row)}: {row['failed']} of {row['requests']} requests failed: {reasons}"
            console.print(text, markup=False, soft_wrap=True)


def _throughput(rows: Sequence[Row]) -> Table:
    table = _table("load", "requests", "failed", "output tokens", "wall s", "tok/s")
    for row in rows:
        table.add_row(
            _load(row), *(str(row[key]) for key in ("requests", "failed", "output_tokens", "wall_s", "tok_s"))
        )
    return table


def _times(rows: Sequence[Row]) -> Table:
    table = _table("load", "time", *_FIGURES)
    for row in rows:
        for title, name in _TIMES.items():
            values = (row[f"{name}_{figure}"] for figure in _FIGURES)
            shown = (f"{value:.1f}" if isinstance(value, float) else "-" for value in values)
            table.add_row(_load(row), title, *shown)
    return table


def _table(*titles: str) -> Table:
    return Table(*(Column(title, justify="right") for title in titles))


def _load(row: Row) -> str:
    return f"{row['rate']:g}/s" if row["rate"] else f"c={row['concurrency']}"
