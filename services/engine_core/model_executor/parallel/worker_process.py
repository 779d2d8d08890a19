"""One worker process as the engine sees it: started with a pipe, ended within a bound. Owner: the busy-loop thread.

The pipe is a socket pair. The engine's end is inherited by nobody, so the kernel closes it with the engine.
On Linux the kernel also kills the worker with the thread that starts it, as long as that is the main thread.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from engine_core.model_executor.parallel.place import Place

_WORKER_MODULE = "engine_core.model_executor.parallel.worker"
# A process that has closed its pipe is as good as gone.
_REAP_TIMEOUT_S = 2.0


class WorkerProcess:
    """A child of the engine."""

    def __init__(self, place: Place) -> None:
        self.place = place
        # The kernel kills a worker at the end of the *thread* that started it. In an engine that is the main thread,
        # which ends with the process. Another thread of an offline program may end long before the model does: from
        # there the worker is not tied, and has the end of its pipe alone.
        is_main = threading.current_thread() is threading.main_thread()
        parent_pid = os.getpid() if is_main else 0
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER_MODULE, str(theirs.fileno()), str(parent_pid)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C reaches a whole process group; the engine has to drain before its workers go.
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def describe_end(self) -> str:
        """How it ended, once its pipe has."""
        try:
            code = self._process.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"worker {self.place.rank} (pid {self.pid}) has closed its pipe"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has exited with code {code}"
        return f"worker {self.place.rank} (pid {self.pid}) {how}"

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it now, if it still runs."""
        self._process.kill()
        self._process.wait()
