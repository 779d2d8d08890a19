"""`python -m engine_core.model_executor.parallel.worker DESCRIPTOR PARENT`: one worker process, started by the engine.

The main thread runs the engine's commands one by one, in their order. The worker ends with its engine: also while it
loads the model, and while it waits for another worker in the middle of a step. On Linux the kernel kills it; elsewhere
a second thread, which reads the pipe, notices the end of the pipe, unless the worker is stopped or holds the GIL.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from engine_core.model_executor.parallel.worker_messages import START_CALL, Answer, Command, Failure, Stop, WorkerStart
from stepwire import log
from stepwire.settings import set_default_variable

if TYPE_CHECKING:
    from engine_core.model_executor.in_process_executor import InProcessExecutor
    from engine_core.model_executor.parallel.worker_group import WorkerGroup

Inbox = queue.SimpleQueue[bytes]

# Of <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Exit code 0 after Stop, 1 when the model can not be loaded. The end of the engine ends the process anywhere."""
    if not _tie_to_engine(int(sys.argv[2])):
        return 1
    # The engine drains with its workers; a signal to the whole process group must not take them away.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), name="engine-watch", daemon=True).start()
    start: WorkerStart = pickle.loads(inbox.get())
    log.configure(start.settings.log_level, start.settings.log_format, f"engine_core worker {start.place.rank}")
    logger = logging.getLogger(f"engine_core.worker_{start.place.rank}")
    try:
        executor, group = _load(start, logger)
    except Exception as error:
        # The engine says it to the operator, once for all workers.
        connection.send(Failure(START_CALL, type(error).__name__, str(error)))
        return 1
    # As in the engine: what exists now lives as long as the process.
    gc.collect()
    gc.freeze()
    connection.send(Answer(START_CALL, executor.model_info))
    _serve(executor, connection, inbox, logger)
    executor.shutdown()
    group.close()
    return 0


def _tie_to_engine(parent_pid: int) -> bool:
    """Let the kernel kill this process at the end of the thread that started it; False when that has ended already.

    `parent_pid` 0: not to be tied, see WorkerProcess.
    """
    if sys.platform != "linux" or not parent_pid:
        return True
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The engine may have ended before the call: then this is another process's child by now.
    return os.getppid() == parent_pid


def _read(connection: Connection, inbox: Inbox) -> None:
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        # Whatever the main thread is in the middle of: nobody waits for it any more.
        os._exit(1)


def _load(start: WorkerStart, logger: logging.Logger) -> tuple[InProcessExecutor, WorkerGroup]:
    # One math thread for each worker: they would fight for the cores otherwise. Before torch is imported.
    set_default_variable("OMP_NUM_THREADS", "1")
    # Here and not at the top: this takes seconds, and the end of the engine must be noticed meanwhile.
    from engine_core.model_executor.in_process_executor import InProcessExecutor
    from engine_core.model_executor.loader import choose_device
    from engine_core.model_executor.parallel.worker_group import WorkerGroup

    group = WorkerGroup(start.place, choose_device(start.settings, start.place), start.rendezvous)
    # One of them is enough to tell the operator how far it is.
    level = logging.INFO if start.place.is_leader else logging.DEBUG
    executor = InProcessExecutor(
        start.settings, start.model_path, lambda message: logger.log(level, "%s", message), group
    )
    return executor, group


def _serve(executor: InProcessExecutor, connection: Connection, inbox: Inbox, logger: logging.Logger) -> None:
    while True:
        message: Command | Stop = pickle.loads(inbox.get())
        if isinstance(message, Stop):
            return
        try:
            value = message.function(executor, *message.arguments)
            if isinstance(value, Future):
                value = value.result()
        except Exception as error:
            logger.exception("%s failed", message.function.__name__)
            connection.send(Failure(message.call_id, type(error).__name__, str(error)))
            if message.call_id is None:
                # An exit would make the other workers fail too, and hide the cause: the engine ends them all.
                threading.Event().wait()
        else:
            if message.call_id is not None:
                connection.send(Answer(message.call_id, value))


if __name__ == "__main__":
    # Without the interpreter's clean-up, which takes seconds and has nothing left to release.
    os._exit(main())
