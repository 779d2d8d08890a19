"""The engine's gRPC service: streams to queues and back. The handler thread of a stream is its output thread.

Runs in gRPC's threads; the busy loop is met at the queues only. Answers that need a loaded model wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator

import grpc

from engine_core import output_frames
from engine_core.core_proc import EngineCoreProc
from engine_core.death import as_error
from engine_core.input_thread import InputThread
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.messages import EngineCoreDead, OutputMessage
from engine_core.output_queue import OutputQueue
from engine_core.request_traces import RequestTraces
from engine_core.resolved_config import ResolvedConfig
from engine_core.scheduler.output import EngineCoreOutputs
from engine_core.session import Session, SessionError
from engine_core.sessions import Sessions
from engine_core.wire import PROTOCOL_VERSION, FrameEncoder
from stepwire import tokenizer_archive, tracing
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc
from stepwire.errors import InvalidRequestError, OverloadedError, StepwireError, UnavailableError
from stepwire.grpc_errors import abort_sync
from stepwire.stream_meter import StreamMeter

logger = logging.getLogger(__name__)

SERVICE_NAME = "stepwire.engine.v1.EngineCoreService"
CONNECT_METHOD = f"/{SERVICE_NAME}/Connect"
# With no deadline of the caller a Connect still may not hold a thread for ever.
MAX_WAIT_FOR_START_S = 3600.0
HELLO_TIMEOUT_S = 10.0
MAX_STREAMS = 200
# Unary calls and health, beside the streams.
MAX_GRPC_THREADS = MAX_STREAMS + 32
RETRY_AFTER_MS = 1000


class EngineCoreServicer(engine_core_pb2_grpc.EngineCoreServiceServicer):
    """Serves frontends. Exists before the model is loaded; `start_serving` hands over what that brought."""

    def __init__(
        self,
        encoder: FrameEncoder,
        lifecycle: EngineLifecycle,
        output_queue: OutputQueue,
        sessions: Sessions,
        meter: StreamMeter,
    ) -> None:
        self._encoder = encoder
        self._lifecycle = lifecycle
        self._output_queue = output_queue
        self._sessions = sessions
        self._meter = meter
        self._proc: EngineCoreProc | None = None
        self._tokenizer_archive = b""
        self._start_failure: EngineCoreDead | None = None
        self._wall_clock = tracing.WallClock()
        # A stream holds a thread of the server for its life; health must always find one.
        self._stream_permits = threading.BoundedSemaphore(MAX_STREAMS)

    def start_serving(self, proc: EngineCoreProc, archive: bytes) -> None:
        """Called once, before the state becomes RUNNING."""
        self._proc = proc
        self._tokenizer_archive = archive

    def start_failed(self, dead: EngineCoreDead) -> None:
        """Called before the state becomes DEAD: those who wait for the start are told why."""
        self._start_failure = dead

    def GetEngineInfo(  # noqa: N802  the name of the RPC
        self, request: pb.GetEngineInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetEngineInfoResponse:
        config = self._proc.core.config if self._proc else None
        return pb.GetEngineInfoResponse(ready=self._encoder.ready(config))

    def GetTokenizer(  # noqa: N802  the name of the RPC
        self, request: pb.GetTokenizerRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GetTokenizerResponse]:
        self._wait_running(context)
        archive, size = self._tokenizer_archive, tokenizer_archive.CHUNK_BYTES
        if not archive:
            abort_sync(context, StepwireError("the model has no tokenizer files", reason="UNSUPPORTED_FEATURE"))
        for start in range(0, len(archive), size):
            is_last = start + size >= len(archive)
            digest = tokenizer_archive.sha256(archive) if is_last else ""
            yield pb.GetTokenizerResponse(data=archive[start : start + size], sha256=digest)

    def Connect(  # noqa: N802  the name of the RPC
        self, request_iterator: Iterator[pb.ConnectRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ConnectResponse]:
        if not self._stream_permits.acquire(blocking=False):
            text = f"{MAX_STREAMS} streams are open, which is the limit"
            abort_sync(context, OverloadedError(text, retry_after_ms=RETRY_AFTER_MS))
        try:
            yield from self._connect(request_iterator, context)
        finally:
            self._stream_permits.release()

    def _connect(
        self, request_iterator: Iterator[pb.ConnectRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ConnectResponse]:
        hello = _read_hello(request_iterator, context)
        proc = self._wait_running(context)
        _check_hello(hello, proc.core.config, context)
        session = self._open(hello, context)
        try:
            yield pb.ConnectResponse(ready=self._encoder.ready(proc.core.config))
            session.outbox.put(proc.stats_message())
            reader = InputThread(proc, session, request_iterator, self._meter)
            threading.Thread(target=reader.run, name=f"input-{session.client_id}", daemon=True).start()
            yield from self._write(session)
            if session.error is not None:
                abort_sync(context, StepwireError(session.error.message, reason=session.error.reason))
        finally:
            self._close(session, proc)

    def _write(self, session: Session) -> Iterator[pb.ConnectResponse]:
        """The output thread: take, encode after coalescing, write; until the outbox ends."""
        while (messages := session.outbox.take()) is not None:
            for message in (part for whole in messages for part in _frames(whole)):
                session.note_written(message)
                began = time.perf_counter()
                frame = self._encoder.encode(message, session.batch_seq + 1, session.live_handles)
                self._meter.made(time.perf_counter() - began)
                session.batch_seq += frame.HasField("outputs")
                yield frame
                session.outbox.note_written()

    def _wait_running(self, context: grpc.ServicerContext) -> EngineCoreProc:
        remaining = context.time_remaining()
        state = self._lifecycle.wait_started(MAX_WAIT_FOR_START_S if remaining is None else remaining)
        if self._start_failure is not None:
            abort_sync(context, as_error(self._start_failure))
        if (
            state in (EngineState.STARTING, EngineState.WARMING_UP, EngineState.DRAINING, EngineState.DEAD)
            or self._proc is None
        ):
            reason = {EngineState.DRAINING: "DRAINING", EngineState.DEAD: "ENGINE_DEAD"}.get(state, "ENGINE_STARTING")
            error = UnavailableError(f"the engine is {state.name}", reason=reason, retry_after_ms=RETRY_AFTER_MS)
            abort_sync(context, error)
        return self._proc

    def _open(self, hello: pb.Hello, context: grpc.ServicerContext) -> Session:
        outbox = self._output_queue.attach(hello.session_id)
        session = Session(hello.session_id, hello.client_id, outbox, RequestTraces(self._wall_clock))
        replaced = self._sessions.open(session)
        if replaced is not None:
            replaced.fail(SessionError("SESSION_REPLACED", "another stream was opened with the same session id"))
        # A client that goes away ends the outbox, which wakes the output thread out of its wait.
        if not context.add_callback(outbox.end):
            outbox.end()
        session.cancel_stream = context.cancel
        logger.info("session %s of %s opened", hello.session_id, hello.client_id)
        return session

    def _close(self, session: Session, proc: EngineCoreProc) -> None:
        left_behind = session.close()
        self._output_queue.detach(session.session_id, session.outbox)
        self._sessions.close(session)
        if left_behind:
            proc.abort(left_behind, "client_cancelled")
        logger.info(
            "session %s of %s closed, %d requests aborted", session.session_id, session.client_id, len(left_behind)
        )


def _frames(message: OutputMessage) -> Iterable[OutputMessage]:
    return output_frames.cut(message) if isinstance(message, EngineCoreOutputs) else (message,)


def _read_hello(frames: Iterator[pb.ConnectRequest], context: grpc.ServicerContext) -> pb.Hello:
    # A stream that never says Hello must not keep its thread.
    timer = threading.Timer(HELLO_TIMEOUT_S, context.cancel)
    timer.start()
    try:
        frame = next(frames, None)
    finally:
        timer.cancel()
    if frame is None or frame.WhichOneof("message") != "hello":
        error = "ConnectRequest.message: the first frame must be Hello"
        abort_sync(context, InvalidRequestError(error, reason="PROTOCOL_VIOLATION"))
    if not frame.hello.session_id:
        abort_sync(context, InvalidRequestError("Hello.session_id: is empty", reason="PROTOCOL_VIOLATION"))
    return frame.hello


def _check_hello(hello: pb.Hello, config: ResolvedConfig, context: grpc.ServicerContext) -> None:
    """Refuse a frontend that could not work with this engine, before any state exists."""
    model = config.served_model
    if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
        reason = "PROTOCOL_VERSION"
        text = f"the engine speaks version {PROTOCOL_VERSION}, not {hello.protocol_min} to {hello.protocol_max}"
    elif hello.expect_model not in ("", model.name):
        reason = "MODEL_MISMATCH"
        text = f"the engine serves {model.name}, not {hello.expect_model}"
    elif hello.expect_tokenizer_sha256 not in ("", model.tokenizer_sha256):
        reason = "TOKENIZER_MISMATCH"
        text = f"the engine's tokenizer is {model.tokenizer_sha256}, not {hello.expect_tokenizer_sha256}"
    else:
        return
    abort_sync(context, StepwireError(text, reason=reason))
