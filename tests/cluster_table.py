"""The table at the end of a cluster run: each test, how it ended, why it was skipped, how long it took."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

WIDTH = 100


@dataclass
class _Row:
    verdict: str = "pass"
    seconds: float = 0.0


class Table:
    """A pytest plugin. `title` is a line above the rows."""

    def __init__(self) -> None:
        self.title = ""
        self._rows: dict[str, _Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Three reports for each test: what comes before it, itself, what comes behind it."""
        row = self._rows.setdefault(report.nodeid.rpartition("::")[2], _Row())
        row.seconds += report.duration
        if report.failed:
            row.verdict = "FAIL"
        elif report.skipped and isinstance(report.longrepr, tuple):
            row.verdict = f"skip ({report.longrepr[2].removeprefix('Skipped: ')})"

    def lines(self) -> list[str]:
        """Without colours, one line for each test."""
        width = min(WIDTH, max(map(len, self._rows), default=0))
        rows = [f"{name:{width}}  {row.seconds:7.1f} s  {row.verdict}" for name, row in self._rows.items()]
        return [*filter(None, [self.title]), *rows]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Printed by pytest behind its own summary."""
        terminalreporter.section("cluster")
        for line in self.lines():
            terminalreporter.write_line(line)
