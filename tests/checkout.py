"""A place in which documented commands are run as they stand, but for the ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 120


class Checkout:
    """A directory that looks like the repository to a newcomer, next to a running stack."""

    def __init__(self, path: Path, ports: Mapping[int, int]) -> None:
        """`ports`: the documented one -> the one that the stack has."""
        self.path = path
        self._ports = ports
        self._bin = path / "bin"
        self._bin.mkdir()
        for name in ("clients", "build", "protos"):
            (path / name).symlink_to(ROOT / name)
        (path / ".venv").symlink_to(sys.prefix)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(self._with_ports(text))

    def add_program(self, name: str, script: str) -> None:
        (self._bin / name).write_text(script)
        (self._bin / name).chmod(0o755)

    def run(self, line: str) -> str:
        """What it printed; it must end well."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._with_ports(line)],
            cwd=self.path,
            env={**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _with_ports(self, text: str) -> str:
        return re.sub(r"127\.0\.0\.1:(\d+)", lambda found: f"127.0.0.1:{self._real(int(found[1]))}", text)

    def _real(self, port: int) -> int:
        return self._ports.get(port, port)
