"""One Connect stream from Hello to its end. Owner: the task of its connection, on the event loop.

Reads, writes and pings are three tasks; the reader alone decides how the stream ended. What is read is handed on in
order, and the next frame is read when it has been processed: that is the back-pressure towards the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn, Protocol

import grpc
import grpc.aio

from frontend.engine_client.clock_offset import ClockOffset
from frontend.engine_client.engine_facts import EngineFacts, EngineLoad, EngineState
from frontend.engine_client.heartbeat import Heartbeat
from frontend.engine_client.outbox import Outbox
from frontend.engine_client.transport_stats import TransportStats
from frontend.engine_client.wire import (
    to_death,
    to_facts,
    to_load,
    to_loss,
    to_outputs,
    to_state,
)
from frontend.engine_outputs import EngineOutput
from frontend.retry_advice import RETRY_AFTER_MS
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import StepwireError, UnavailableError

logger = logging.getLogger(__name__)

Call = grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]


class _ClosedByUsError(Exception):
    """The stream ended because we said Goodbye."""


class SessionListener(Protocol):
    """Where the news of a session go."""

    async def on_outputs(self, outputs: list[EngineOutput]) -> None: ...

    def on_load(self, load: EngineLoad) -> None: ...

    def on_weight_version(self, version: str) -> None: ...

    def on_engine_state(self, state: EngineState) -> None: ...

    def on_batch_gap(self, num_missing: int) -> None: ...

    def on_utility_result(self, result: pb.UtilityResult) -> None: ...


class EngineSession:
    """An open stream. `outbox` takes what is to be written, also before the stream is ready."""

    def __init__(self, call: Call, listener: SessionListener, stats: TransportStats) -> None:
        self.outbox = Outbox()
        self._call = call
        self._listener = listener
        self._stats = stats
        stats.outboxes.append(self.outbox)
        self._engine_id = ""
        self._boot_id = ""
        self._last_batch_seq = 0
        self._is_draining = False
        self._said_goodbye = False

    async def open(self, hello: pb.Hello) -> EngineFacts:
        """Say Hello and wait for Ready; the engine holds it back while it loads. The caller limits the time."""
        await self._call.write(pb.ConnectRequest(hello=hello))
        frame = await self._call.read()
        if not isinstance(frame, pb.ConnectResponse):
            raise to_loss("transport", "", "it ended the stream before Ready")
        if frame.WhichOneof("message") == "engine_dead":
            raise to_death(frame.engine_dead)
        if frame.WhichOneof("message") != "ready":
            raise to_loss("transport", "", f"its first frame was {frame.WhichOneof('message')} and not Ready")
        facts = to_facts(frame.ready)
        self._boot_id, self._engine_id = facts.boot_id, facts.engine_id
        self._stats.meter.read("ready", 0.0)
        self._heartbeat = Heartbeat(facts.ping_interval_s, facts.ping_timeout_s)
        self._clock = self._stats.clocks[facts.engine_id] = ClockOffset(facts.boot_id)
        return facts

    async def run(self) -> None:
        """Until the stream ends. Returns after our Goodbye; raises EngineDeadError or UnavailableError otherwise."""
        end: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for part in (self._read(), self._write(), self._ping()):
                    group.create_task(part)
        except* _ClosedByUsError:
            pass
        except* StepwireError as ends:
            end = ends.exceptions[0]
        if end is not None:
            raise end

    def cancel(self) -> None:
        """Drop the stream without a word, or let go of one that is over."""
        if self.outbox in self._stats.outboxes:
            self._stats.outboxes.remove(self.outbox)
        self._call.cancel()

    def say_goodbye(self, reason: str, *, abort_running: bool) -> None:
        """Nothing may be put into the outbox after this; outputs are still read."""
        self._said_goodbye = True
        self.outbox.put(pb.ConnectRequest(goodbye=pb.Goodbye(reason=reason, abort_running=abort_running)))

    async def _read(self) -> NoReturn:
        try:
            while True:
                frame = await self._call.read()
                if not isinstance(frame, pb.ConnectResponse):
                    raise self._end_of_stream()
                if frame.WhichOneof("message") == "engine_dead":
                    raise to_death(frame.engine_dead)
                self._heartbeat.received()
                await self._receive(frame)
                self._heartbeat.heard(time.monotonic())
        except grpc.aio.AioRpcError as error:
            raise to_loss("transport", self._boot_id, f"{error.code().name}: {error.details()}") from None

    def _end_of_stream(self) -> Exception:
        if self._said_goodbye:
            return _ClosedByUsError()
        if self._is_draining:
            return UnavailableError("the engine has shut down", reason="DRAINING", retry_after_ms=RETRY_AFTER_MS)
        return to_loss("transport", self._boot_id, "it ended the stream without a word")

    async def _receive(self, frame: pb.ConnectResponse) -> None:
        kind = frame.WhichOneof("message")
        if kind == "outputs":
            await self._receive_outputs(frame.outputs)
            return
        self._stats.meter.read(kind, 0.0)
        if kind == "pong":
            self._on_pong(frame.pong)
            self._report_state(to_state(frame.pong.state))
        elif kind == "shutdown":
            self._is_draining = True
            self._listener.on_engine_state(EngineState.DRAINING)
        elif kind == "utility_result":
            self._listener.on_utility_result(frame.utility_result)
        else:
            # Kinds of frames that a newer engine may have added carry nothing that this frontend asked for.
            logger.debug("frame of kind %s ignored", kind)

    def _on_pong(self, pong: pb.Pong) -> None:
        sent = self._heartbeat.on_pong(pong)
        if sent is not None:
            now = time.monotonic()
            self._stats.ponged(self._engine_id, now - sent, through_step_loop=pong.through_step_loop)
            # One through the step loop has waited there, before the engine looked at its clock.
            if not pong.through_step_loop:
                self._clock.note(sent, now, pong.engine_monotonic_ns)

    async def _receive_outputs(self, batch: pb.EngineCoreOutputs) -> None:
        missing = batch.batch_seq - self._last_batch_seq - 1
        self._last_batch_seq = batch.batch_seq
        if missing:
            self._listener.on_batch_gap(missing)
        # Before the outputs: the weights may have made them.
        self._listener.on_weight_version(batch.stats.weight_version)
        began = time.perf_counter()
        outputs = to_outputs(batch)
        self._stats.meter.read("outputs", time.perf_counter() - began)
        if outputs:
            await self._listener.on_outputs(outputs)
        # After the outputs: the snapshot counts the requests that they say are queued.
        if batch.HasField("stats"):
            self._listener.on_load(to_load(batch.stats))
            self._report_state(to_state(batch.stats.state))

    def _report_state(self, state: EngineState) -> None:
        if self._is_draining:
            return
        if state.is_serving and self._heartbeat.is_stalled(time.monotonic()):
            state = EngineState.STALLED
        self._listener.on_engine_state(state)

    async def _write(self) -> None:
        try:
            while True:
                await self.outbox.wait()
                began = time.perf_counter()
                for frame in self.outbox.take():
                    self._stats.meter.made(time.perf_counter() - began)
                    await self._call.write(frame)
                    began = time.perf_counter()
                if self._said_goodbye:
                    await self._call.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream is over; the reader learns why and says it.
            return

    async def _ping(self) -> NoReturn:
        next_ping = wake_up = time.monotonic()
        while True:
            now = time.monotonic()
            self._heartbeat.excuse(now - wake_up, now)
            if now >= next_ping:
                self._send_pings(now)
                next_ping = now + self._heartbeat.interval_s
            lost_at = self._heartbeat.lost_at()
            if lost_at is not None and now >= lost_at:
                raise to_loss("heartbeat", self._boot_id, "it does not answer pings")
            wake_up = min(next_ping, lost_at or next_ping)
            await asyncio.sleep(wake_up - now)

    def _send_pings(self, now: float) -> None:
        if self._said_goodbye:
            return
        for ping in self._heartbeat.pings(now):
            self.outbox.put(pb.ConnectRequest(ping=ping))
