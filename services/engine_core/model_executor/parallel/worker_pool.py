"""All workers of one executor: calls go out in order, answers come back as futures, and any death fails everything.

The busy-loop thread sends; a monitor thread reads the answers and notices the deaths. Never restarts a worker: the
others are in the middle of a step with it.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from multiprocessing import connection as pipes
from typing import Any

from engine_core.model_executor.executor import FailureCallback, WorkerError
from engine_core.model_executor.parallel.worker_messages import START_CALL, Answer, Command, Failure, Stop, WorkerStart
from engine_core.model_executor.parallel.worker_process import WorkerProcess
from engine_core.model_executor.startup_error import StartupError

logger = logging.getLogger(__name__)

# Less than the engine allows itself for the whole clean-up.
STOP_TIMEOUT_S = 4.0
# The monitor learns of a death as soon as a write to it fails.
_FAILURE_WAIT_S = 1.0

# Rank and call.
_CallKey = tuple[int, int]


class WorkerPool:
    """Starts with the first call to `start`; safe to stop at any point, and twice."""

    def __init__(self, failure_callback: FailureCallback) -> None:
        self._failure_callback = failure_callback
        self._workers: list[WorkerProcess] = []
        self._call_ids = itertools.count(START_CALL + 1)
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._pending: dict[_CallKey, Future[Any]] = {}
        self._failure: WorkerError | StartupError | None = None
        self._has_failed = threading.Event()
        self._is_stopping = False
        self._monitor = threading.Thread(target=self._watch, name="worker-monitor", daemon=True)

    def start(self, starts: Sequence[WorkerStart]) -> list[Any]:
        """Start a worker for each; returns their answers once all have loaded. Raises the first failure."""
        for start in starts:
            self._workers.append(WorkerProcess(start.place))
        logger.info("workers have pids %s", ", ".join(str(worker.pid) for worker in self._workers))
        futures = [self._expect(rank, START_CALL) for rank in range(len(starts))]
        self._monitor.start()
        for rank, start in enumerate(starts):
            self._send(rank, pickle.dumps(start))
        return self.results(futures)

    def call_all(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Future[Any]]:
        """Let every worker run a method of its executor."""
        call_id = next(self._call_ids)
        # Before the sending: an answer may come at once.
        futures = [self._expect(rank, call_id) for rank in range(len(self._workers))]
        self._send_all(Command(call_id, function, arguments))
        return futures

    def call(self, rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        """The same with one worker."""
        call_id = next(self._call_ids)
        future = self._expect(rank, call_id)
        self._send(rank, pickle.dumps(Command(call_id, function, arguments)))
        return future

    def tell(self, ranks: Sequence[int], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Without an answer; a failure ends the engine."""
        self._send_all(Command(None, function, arguments), ranks)

    @staticmethod
    def results(futures: Sequence[Future[Any]]) -> list[Any]:
        """Of all, or the first failure: the workers that wait for the failed one would never answer."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]

    def stop(self) -> None:
        """Ask, wait, kill; without asking after a failure."""
        with self._lock:
            self._is_stopping = True
        if self._failure is None:
            self._ask_to_stop()
        self.kill()

    def kill(self) -> None:
        """End all workers now."""
        with self._lock:
            self._is_stopping = True
        for worker in self._workers:
            worker.kill()
        if self._monitor.ident is not None:
            # The pipes have ended, so it ends too.
            self._monitor.join()
        for worker in self._workers:
            worker.connection.close()
        self._workers = []
        self._fail(WorkerError("the executor was shut down"))

    def _ask_to_stop(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        try:
            self._send_all(Stop())
        except WorkerError as error:
            logger.warning("stopping: %s", error)
            return
        for worker in self._workers:
            if not worker.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("worker %d did not stop within %.0f s and is killed", worker.place.rank, STOP_TIMEOUT_S)

    # -- sending -----------------------------------------------------------------------------------------------------

    def _expect(self, rank: int, call_id: int) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._require_alive()
            self._pending[rank, call_id] = future
        return future

    def _send_all(self, message: Command | Stop, ranks: Sequence[int] | None = None) -> None:
        self._require_alive()
        data = pickle.dumps(message)
        for rank in range(len(self._workers)) if ranks is None else ranks:
            self._send(rank, data)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._workers[rank].connection.send_bytes(data)
        except OSError as error:
            self._has_failed.wait(_FAILURE_WAIT_S)
            raise self._failure or WorkerError(f"worker {rank} can not be reached: {error}") from error

    # -- the monitor thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        workers = {worker.connection: worker for worker in self._workers}
        while workers:
            messages: list[tuple[int, Answer | Failure]] = []
            ended: list[WorkerProcess] = []
            for ready in pipes.wait(list(workers)):
                worker = workers[ready]  # type: ignore[index]  # it is one of the connections that were passed
                try:
                    messages.append((worker.place.rank, worker.connection.recv()))
                except (EOFError, OSError):
                    ended.append(worker)
                    # Not closed before `kill`: the loop may be writing to it.
                    del workers[worker.connection]
            # What a worker said before its end counts; what others say because of it does not.
            ranks_ended = {worker.place.rank for worker in ended}
            for rank, message in messages:
                if not ranks_ended or isinstance(message, Answer):
                    self._receive(rank, message)
            if ended and not self._is_stopping:
                self._fail(WorkerError(ended[0].describe_end()))

    def _receive(self, rank: int, message: Answer | Failure) -> None:
        if isinstance(message, Answer):
            future = self._take(rank, message.call_id)
            if future is not None:
                future.set_result(message.value)
            return
        error = _error_of(rank, message)
        future = None if message.call_id is None else self._take(rank, message.call_id)
        if future is not None:
            future.set_exception(error)
        elif message.call_id is None:
            self._fail(error)

    def _take(self, rank: int, call_id: int) -> Future[Any] | None:
        """None for an answer that nobody waits for any more."""
        with self._lock:
            return self._pending.pop((rank, call_id), None)

    def _fail(self, error: WorkerError | StartupError) -> None:
        """The first failure is the cause: it ends every call that waits, and the engine."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            pending, self._pending = self._pending, {}
            is_stopping = self._is_stopping
        self._has_failed.set()
        for future in pending.values():
            future.set_exception(error)
        if not is_stopping:
            self._failure_callback(error)


def _error_of(rank: int, failure: Failure) -> WorkerError | StartupError:
    if failure.cause_type == StartupError.__name__:
        return StartupError(failure.message)
    return WorkerError(f"worker {rank}: {failure.message}", failure.cause_type)
