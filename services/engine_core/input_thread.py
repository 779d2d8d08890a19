"""The input thread of one stream: frames to domain objects, preprocessed, onto the queues. One for each session.

A broken ADD becomes an ERROR finish of that handle; a frame that is none of ours ends this session. Neither harms the
engine or another session. Never touches the scheduler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import grpc

from engine_core.core_proc import EngineCoreProc
from engine_core.messages import Add, PingStepLoop, Pong, UtilityCall, UtilityResult
from engine_core.request_wire import decode_abort_reason, decode_request
from engine_core.scheduler.output import EngineCoreOutput, EngineCoreOutputs, Finish, FinishReason
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_error import RequestError
from engine_core.session import Session, SessionError
from engine_core.utility_wire import decode_operation
from stepwire import tracing
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import StepwireError
from stepwire.stream_meter import StreamMeter

logger = logging.getLogger(__name__)


class InputThread:
    """Reads the request stream of one session until it ends."""

    def __init__(
        self, proc: EngineCoreProc, session: Session, frames: Iterator[pb.ConnectRequest], meter: StreamMeter
    ) -> None:
        self._proc = proc
        self._session = session
        self._frames = frames
        self._meter = meter

    def run(self) -> None:
        """Thread body. The end of the stream without a goodbye is the output thread's to notice."""
        try:
            for frame in self._frames:
                began = time.perf_counter()
                self._dispatch(frame)
                self._meter.read(frame.WhichOneof("message"), time.perf_counter() - began)
        except grpc.RpcError:
            logger.debug("session %s: the stream broke", self._session.session_id)
        except Exception as error:
            logger.exception("session %s: the input thread failed", self._session.session_id)
            self._session.fail(SessionError("INTERNAL", f"{type(error).__name__} while reading the stream"))
        else:
            # Half-closed: whatever still runs is delivered, goodbye or not.
            self._session.leave()

    def _dispatch(self, frame: pb.ConnectRequest) -> None:
        match frame.WhichOneof("message"):
            case "add":
                self._add(frame.add)
            case "abort":
                keys = [(self._session.session_id, handle) for handle in frame.abort.handles]
                self._proc.abort(keys, decode_abort_reason(frame.abort.reason))
            case "ping":
                self._ping(frame.ping)
            case "utility":
                self._utility(frame.utility)
            case "goodbye":
                self._goodbye(frame.goodbye)
            case kind:
                found = f"a second {kind}" if kind else "no message that this engine knows"
                self._session.fail(
                    SessionError("PROTOCOL_VIOLATION", f"ConnectRequest.message: the frame holds {found}")
                )

    def _add(self, message: pb.AddRequests) -> None:
        requests = [request for request in map(self._preprocess, message.requests) if request is not None]
        if not requests:
            return
        self._proc.input_queue.put(Add(requests))
        # The stream may have closed while the prompts were hashed; its abort then came before this add and hit nothing.
        if self._session.is_closed:
            self._proc.abort([request.key for request in requests], "client_cancelled")

    def _preprocess(self, message: pb.EngineCoreRequest) -> Request | None:
        if not self._session.open_request(message.handle):
            return None
        if message.traceparent:
            self._begin_trace(message)
        try:
            request = decode_request(self._session.session_id, message, self._proc.core.clock())
            error = self._proc.core.preprocess_add_request(request)
        except Exception as exception:
            extra = {"request_id": message.request_id}
            if trace_id := tracing.trace_id_of(message.traceparent):
                extra["trace_id"] = trace_id
            logger.warning("a request could not be decoded", exc_info=True, extra=extra)
            text = f"the request could not be decoded: {exception}"
            error = RequestError("REQUEST_FAILED", text, retryable=True, cause_type=type(exception).__name__)
        if error is None:
            return request
        counts = self._proc.num_unreadable if error.reason == "REQUEST_FAILED" else self._proc.num_rejected
        counts.add(error.reason)
        reason = FinishReason.ERROR if error.reason == "REQUEST_FAILED" else FinishReason.REJECTED
        output = EngineCoreOutput((self._session.session_id, message.handle), finish=Finish(reason, error=error))
        now = self._proc.core.clock()
        self._session.outbox.put(EngineCoreOutputs(self._proc.progress.num_steps, now, [output]))
        return None

    def _begin_trace(self, message: pb.EngineCoreRequest) -> None:
        context = ((tracing.TRACEPARENT, message.traceparent), (tracing.TRACESTATE, message.tracestate))
        self._session.traces.begin(message.handle, message.request_id, context)

    def _ping(self, ping: pb.Ping) -> None:
        if ping.through_step_loop:
            message = PingStepLoop(self._session.session_id, ping.nonce, ping.client_monotonic_ns)
            self._proc.input_queue.put(message)
        else:
            self._session.outbox.put(Pong(ping.nonce, False, ping.client_monotonic_ns))

    def _utility(self, call: pb.UtilityCall) -> None:
        deadline = self._proc.core.clock() + call.timeout_ms / 1000 if call.timeout_ms else None
        try:
            operation = decode_operation(call)
        except StepwireError as error:
            refusal = RequestError(error.reason, error.message)
            self._session.outbox.put(UtilityResult(call.call_id, refusal))
        else:
            self._proc.input_queue.put(UtilityCall(self._session.session_id, call.call_id, operation, deadline))

    def _goodbye(self, goodbye: pb.Goodbye) -> None:
        logger.info("session %s: goodbye (%s)", self._session.session_id, goodbye.reason or "no reason given")
        if goodbye.abort_running:
            keys = [(self._session.session_id, handle) for handle in self._session.live_handles()]
            self._proc.abort(keys, "shutdown")
        self._session.leave()
