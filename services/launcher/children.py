"""Child processes: started with a log file, owned through a pipe, stopped with SIGTERM.

The pipe on a child's stdin is never written. Its end of file, which also comes when the launcher is killed, tells the
child (`--owner parent`) to go: no death of the launcher leaves a service behind.
"""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LaunchError

NUM_LOG_LINES = 15
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Child:
    """One running service."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    start_time: float

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that ended it."""
        return self.process.poll()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.start_time

    def check_alive(self) -> None:
        """Raises LaunchError with the end of the log when the process has ended by itself."""
        if (code := self.exit_code) is not None:
            raise LaunchError(f"{self.name} has ended with code {code}; the end of {self.log_path}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines it logged."""
        with self.log_path.open(encoding="utf-8", errors="replace") as log:
            return "".join(deque(log, NUM_LOG_LINES)).rstrip() or "(nothing was logged)"

    def stop(self, timeout_s: float) -> str:
        """Ask it to drain and end; returns what went wrong with that, empty when nothing did."""
        self.process.terminate()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.name} did not stop within {timeout_s:g} s and was killed"
        self.close()
        return f"{self.name} did not stop cleanly: code {code}, see {self.log_path}" if code != 0 else ""

    def kill(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.wait(KILL_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Let go of one that has ended."""
        if self.process.stdin is not None:
            self.process.stdin.close()


def start(
    name: str,
    command: Sequence[str],
    log_dir: Path,
    environment: Mapping[str, str] | None = None,
    *,
    keep_log: bool = False,
) -> Child:
    """Start a service; its output goes to `log_dir/<name>.log`, behind what is there or in its place."""
    log_dir.mkdir(parents=True, exist_ok=True)
    log_path = log_dir / f"{name.replace(' ', '_')}.log"
    with log_path.open("ab" if keep_log else "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C reaches a whole process group; the launcher decides who drains first, so it must get it alone.
            start_new_session=True,
        )
    return Child(name, process, log_path, time.monotonic())
