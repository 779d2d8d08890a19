"""One Connect stream of the fake engine: reads frames, runs its requests step by step, writes batches in order."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from fakes.fake_logprobs import fake_rows
from fakes.fake_pooling import wire_vector
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.packed_logprobs import PackedLogprobs
from stepwire.v1 import common_pb2

if TYPE_CHECKING:
    from fakes.fake_engine import FakeEngine

QUEUE_TIMEOUT = common_pb2.EngineError(
    reason="QUEUE_TIMEOUT", message="not scheduled in time", grpc_code=4, retryable=True
)
DEADLINE = common_pb2.EngineError(reason="DEADLINE", message="the deadline has passed", grpc_code=4)
DRAINING = common_pb2.EngineError(
    reason="DRAINING", message="the engine is draining", grpc_code=14, retryable=True, retry_after_ms=1000
)


@dataclass
class _Live:
    request: pb.EngineCoreRequest
    prompt: list[int]
    deadline: float
    queue_deadline: float
    num_output: int
    # Events not yet reported.
    events: list[pb.Event] = field(default_factory=list)
    is_scheduled: bool = False


class FakeEngineSession:
    """Created when Hello has been accepted; `run` is the rest of the RPC."""

    def __init__(self, engine: FakeEngine, context: grpc.aio.ServicerContext) -> None:
        self.live: dict[int, _Live] = {}
        self.over = asyncio.Event()
        self._engine = engine
        self._context = context
        self._frames: asyncio.Queue[pb.ConnectResponse | None] = asyncio.Queue(maxsize=4)
        self._last_words: pb.ConnectResponse | None = None
        self._batch_seq = 0
        self._step = 0
        self._has_work = asyncio.Event()
        self._is_draining = False
        self._peer_is_done = False
        self._end = asyncio.Event()

    async def run(self) -> None:
        await self._context.write(pb.ConnectResponse(ready=self._engine.ready))
        tasks = [asyncio.create_task(part) for part in (self._read(), self._run_steps(), self._end.wait())]
        writer = asyncio.create_task(self._write())
        try:
            done, _ = await asyncio.wait([*tasks[1:], writer], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._frames.put(self._last_words)
            if self._last_words is not None:
                await self._frames.put(None)
            await writer
        finally:
            for task in (*tasks, writer):
                task.cancel()

    def die(self, message: str, cause_type: str) -> None:
        dead = pb.EngineDead(
            cause=pb.ENGINE_DEATH_CAUSE_STEP_FAILED,
            cause_type=cause_type,
            message=message,
            boot_id=self._engine.ready.boot_id,
            last_step=self._step,
            lost_handles=list(self.live),
            report_id="report-1",
        )
        self._last_words = pb.ConnectResponse(engine_dead=dead)
        self._end.set()

    def begin_drain(self) -> None:
        self._is_draining = True
        self._frames.put_nowait(
            pb.ConnectResponse(
                shutdown=pb.ShutdownNotice(drain_remaining_ms=30_000, reason="test", requests_in_flight=len(self.live))
            )
        )
        self._has_work.set()

    def end_without_a_word(self) -> None:
        """The stream ends with OK, which only Goodbye and a drain allow."""
        self._end.set()

    def send(self, frame: pb.ConnectResponse) -> None:
        """Whatever the test likes to spoil."""
        self._frames.put_nowait(frame)

    def send_outputs(self, handles: list[int] | None = None, token_ids: list[int] | None = None) -> None:
        """A batch of the test's own making."""
        self._frames.put_nowait(self._batch(handles, token_ids, None))

    def skip_batches(self, num: int) -> None:
        """Lose batches on the way."""
        self._batch_seq += num

    async def _write(self) -> None:
        while (frame := await self._frames.get()) is not None:
            # Numbered only here: two tasks put batches, and one may overtake the other on its way into the queue.
            if frame.HasField("outputs") and not frame.outputs.batch_seq:
                self._batch_seq += 1
                frame.outputs.batch_seq = self._batch_seq
            await self._context.write(frame)

    # Frontend to engine.

    async def _read(self) -> None:
        while True:
            frame = await self._context.read()
            if not isinstance(frame, pb.ConnectRequest):
                self._peer_is_done = True
                self._has_work.set()
                return
            await self._receive(frame)
            self._has_work.set()
            await self._engine.tell()

    async def _receive(self, frame: pb.ConnectRequest) -> None:
        kind = frame.WhichOneof("message")
        if kind == "add":
            self._engine.add_frames += 1
            for request in frame.add.requests:
                await self._add(request)
        elif kind == "abort":
            self._engine.aborts.append(frame.abort)
            for handle in frame.abort.handles:
                if self.live.pop(handle, None):
                    await self._finish(handle, pb.Finish(reason=pb.ENGINE_FINISH_REASON_ABORTED))
        elif kind == "ping":
            await self._answer(frame.ping)
        elif kind == "goodbye":
            self._engine.goodbyes.append(frame.goodbye)
            if frame.goodbye.abort_running:
                for handle in list(self.live):
                    del self.live[handle]
                    await self._finish(handle, pb.Finish(reason=pb.ENGINE_FINISH_REASON_ABORTED))
        else:
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a frame must have exactly one message")

    async def _answer(self, ping: pb.Ping) -> None:
        engine = self._engine
        if engine.answers_pings and (engine.answers_step_loop_pings or not ping.through_step_loop):
            pong = pb.Pong(
                nonce=ping.nonce,
                through_step_loop=ping.through_step_loop,
                client_monotonic_ns=ping.client_monotonic_ns,
                engine_monotonic_ns=self._engine.monotonic_ns(),
                step=self._step,
                state=engine.ready.state,
            )
            await self._frames.put(pb.ConnectResponse(pong=pong))

    async def _add(self, request: pb.EngineCoreRequest) -> None:
        engine = self._engine
        engine.adds.append(request)
        error = DRAINING if self._is_draining else engine.reject(request)
        if error is not None:
            await self._finish(request.handle, pb.Finish(reason=pb.ENGINE_FINISH_REASON_REJECTED, error=error))
            return
        await engine.may_admit.wait()
        now = time.monotonic()
        resumed = len(request.resume_output_token_ids) // 4
        live = _Live(
            request=request,
            prompt=token_array.unpack(request.prompt_token_ids),
            deadline=now + request.deadline_in_us / 1e6 if request.deadline_in_us else float("inf"),
            queue_deadline=now + request.queue_deadline_in_us / 1e6 if request.queue_deadline_in_us else float("inf"),
            num_output=resumed,
        )
        self.live[request.handle] = live
        queued = pb.Event(type=pb.EVENT_TYPE_QUEUED, monotonic_ns=self._engine.monotonic_ns())
        await self._send_batch(outputs=[pb.RequestOutput(handle=request.handle, events=[queued])])

    # The steps.

    async def _run_steps(self) -> None:
        while not (self._is_over() and not self.live):
            await self._wait_for_work()
            if self.live:
                await self._run_step()
                await self._engine.tell()
            # Let the reader have its turn, as an input thread would.
            await asyncio.sleep(0)

    def _is_over(self) -> bool:
        return self._peer_is_done or self._is_draining

    async def _wait_for_work(self) -> None:
        """Until a step can do something, a deadline passes (model or not), or a frame has changed something."""
        ticks = [asyncio.ensure_future(self._has_work.wait())]
        if self.live:
            ticks.append(asyncio.ensure_future(self._engine.may_step.wait()))
        deadlines = [min(live.deadline, live.queue_deadline) for live in self.live.values()]
        left = min(deadlines, default=float("inf")) - time.monotonic()
        try:
            await asyncio.wait(
                ticks, timeout=None if left == float("inf") else max(0.0, left), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for tick in ticks:
                tick.cancel()
        self._has_work.clear()

    async def _run_step(self) -> None:
        self._step += 1
        handles: list[int] = []
        token_ids: list[int] = []
        outputs: list[pb.RequestOutput] = []
        for handle, live in list(self.live.items()):
            output = self._advance(live)
            if output is None:
                continue
            if output.HasField("finish"):
                del self.live[handle]
            is_plain = len(output.new_token_ids) == 1 and not (
                output.events or output.HasField("finish") or output.HasField("logprobs")
            )
            if is_plain:
                handles.append(handle)
                token_ids.append(output.new_token_ids[0])
            else:
                outputs.append(output)
        if handles or outputs:
            await self._send_batch(handles=handles, token_ids=token_ids, outputs=outputs)

    def _advance(self, live: _Live) -> pb.RequestOutput | None:
        now = time.monotonic()
        request = live.request
        output = pb.RequestOutput(handle=request.handle)
        error = DEADLINE if now >= live.deadline else None
        if not live.is_scheduled and now >= live.queue_deadline:
            error = QUEUE_TIMEOUT
        if error is None and self._engine.may_step.is_set():
            error = self._engine.fail(request, live.num_output)
        elif error is None:
            return None
        if error is not None:
            output.finish.CopyFrom(pb.Finish(reason=pb.ENGINE_FINISH_REASON_ERROR, error=error))
            return output
        self._generate(live, output)
        return output

    def _generate(self, live: _Live, output: pb.RequestOutput) -> None:
        if not live.is_scheduled:
            live.is_scheduled = True
            live.queue_deadline = float("inf")
            for kind in (pb.EVENT_TYPE_SCHEDULED, pb.EVENT_TYPE_FIRST_TOKEN):
                output.events.add(type=kind, monotonic_ns=self._engine.monotonic_ns())
            _add_prompt_logprobs(live, output)
            output.prefill.CopyFrom(pb.PrefillStats(prompt_tokens=len(live.prompt), computed_tokens=len(live.prompt)))
        if live.request.HasField("pooling"):
            output.pooled = wire_vector(live.prompt, live.request.pooling)
            output.finish.reason = pb.ENGINE_FINISH_REASON_STOP
            return
        for _ in range(self._engine.tokens_per_step):
            token_id = live.prompt[live.num_output % len(live.prompt)]
            output.new_token_ids.append(token_id)
            live.num_output += 1
            finish = _stop(live.request, token_id, live.num_output)
            if finish is not None:
                output.finish.CopyFrom(finish)
                break
        _add_token_logprobs(live, output)

    # Engine to frontend.

    async def _finish(self, handle: int, finish: pb.Finish) -> None:
        await self._send_batch(outputs=[pb.RequestOutput(handle=handle, finish=finish)])

    async def _send_batch(
        self,
        handles: list[int] | None = None,
        token_ids: list[int] | None = None,
        outputs: list[pb.RequestOutput] | None = None,
    ) -> None:
        await self._frames.put(self._batch(handles, token_ids, outputs))

    def _batch(
        self, handles: list[int] | None, token_ids: list[int] | None, outputs: list[pb.RequestOutput] | None
    ) -> pb.ConnectResponse:
        ready = self._engine.ready
        stats = pb.SchedulerStats(
            running=len(self.live),
            steps=self._step,
            state=ready.state,
            kv_blocks_total=100,
            weight_version=ready.weight_version,
        )
        stats.MergeFrom(self._engine.stats)
        batch = pb.EngineCoreOutputs(
            step=self._step,
            monotonic_ns=self._engine.monotonic_ns(),
            handles=handles,
            token_ids=token_ids,
            outputs=outputs,
            stats=stats,
        )
        return pb.ConnectResponse(outputs=batch)


def _add_prompt_logprobs(live: _Live, output: pb.RequestOutput) -> None:
    if live.request.HasField("prompt_logprobs") and len(live.prompt) > 1:
        output.prompt_logprobs.CopyFrom(_wire(fake_rows(live.prompt[1:], 1, live.request.prompt_logprobs)))


def _add_token_logprobs(live: _Live, output: pb.RequestOutput) -> None:
    request = live.request
    if request.HasField("logprobs") or request.logprob_token_ids:
        first = len(live.prompt) + live.num_output - len(output.new_token_ids)
        rows = fake_rows(output.new_token_ids, first, request.logprobs, request.logprob_token_ids)
        output.logprobs.CopyFrom(_wire(rows))


def _wire(rows: PackedLogprobs) -> pb.Logprobs:
    return pb.Logprobs(width=rows.width, token_ids=rows.token_ids, logprobs=rows.logprobs, ranks=rows.ranks)


def _stop(request: pb.EngineCoreRequest, token_id: int, num_output: int) -> pb.Finish | None:
    """The stop check of a scheduler, in its order."""
    if num_output < request.min_tokens:
        return None
    if token_id in request.eos_token_ids and not request.ignore_eos:
        return pb.Finish(reason=pb.ENGINE_FINISH_REASON_STOP)
    if token_id in request.stop_token_ids:
        return pb.Finish(reason=pb.ENGINE_FINISH_REASON_STOP, stop_token_id=token_id)
    if num_output >= request.max_tokens:
        return pb.Finish(reason=pb.ENGINE_FINISH_REASON_LENGTH)
    return None
