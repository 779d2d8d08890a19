"""A launcher that can be killed: `python -m fakes.engine_owner [engine flags]`.

It starts the fake engine as its child, holds the other end of the child's stdin as `--owner parent` expects, and waits.
The log of the engine is its own.
"""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    command = [sys.executable, "-m", "fakes.fake_engine_process", *sys.argv[1:]]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE)
    sys.stderr.write(f"engine has pid {engine.pid}\n")
    sys.stderr.flush()
    return engine.wait()


if __name__ == "__main__":
    sys.exit(main())
