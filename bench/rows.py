"""What a benchmark reports: one figure a row, with its target if it has one; and how rows are shown and passed on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Column, Table

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Row:
    """`value` is what `name` says, in `case`. `target` None = measured for its own sake."""

    name: str
    case: str
    value: float
    target: float | None = None
    better: Better = "lower"

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}


def main(measure: Callable[[], Iterable[Row]]) -> None:
    """The command line of one benchmark that has no other options."""
    arguments = parser().parse_args()
    report(measure(), is_json=arguments.json)


def parser() -> argparse.ArgumentParser:
    """The options of every benchmark."""
    options = argparse.ArgumentParser()
    options.add_argument("--json", action="store_true", help="one JSON line a row, for bench.run")
    return options


def report(found: Iterable[Row], *, is_json: bool) -> None:
    """A table, or a JSON line for each row as soon as it is measured."""
    rows = []
    for row in found:
        rows.append(row)
        if is_json:
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
            sys.stdout.flush()
    if not is_json:
        show(rows)


def read(line: str) -> Row:
    """A line that `main` has written."""
    return Row(**json.loads(line))


def show(rows: Sequence[Row]) -> None:
    """All rows as a table on standard output."""
    table = Table("what", "case", Column("value", justify="right"), Column("target", justify="right"), "met")
    for row in rows:
        target = "" if row.target is None else f"{'≤' if row.better == 'lower' else '≥'} {row.target:g}"
        met = {None: "", True: "yes", False: "NO"}[row.met]
        table.add_row(row.name, row.case, f"{row.value:.4g}" if row.value < 1e4 else f"{row.value:.0f}", target, met)
    Console().print(table)
