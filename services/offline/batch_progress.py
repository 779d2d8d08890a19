"""The progress bar of a batch, on standard error. Drawn by whoever advances it: no thread of its own."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from offline.outputs import RequestOutput

_REDRAW_S = 0.1


class BatchProgress:
    """A context manager; `advance` with each finished request."""

    def __init__(self, num_requests: int, *, is_shown: bool) -> None:
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
        self._progress = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            disable=not is_shown,
        )
        self._task = self._progress.add_task("", total=num_requests, speed="")
        self._num_tokens = 0
        self._started = self._drawn = time.monotonic()

    def __enter__(self) -> BatchProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, output: RequestOutput) -> None:
        """One more request is over."""
        now = time.monotonic()
        self._num_tokens += output.usage.completion_tokens
        speed = f"{self._num_tokens / max(now - self._started, 1e-9):.0f} tokens/s"
        self._progress.update(self._task, advance=1, speed=speed)
        if now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._progress.refresh()
