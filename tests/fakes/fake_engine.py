"""An engine core without model and scheduler: EngineCoreService on a real socket, under the test's control.

It echoes: prompt tokens come back one a step, from the start of the prompt again when it ends. What it refuses,
delays, drops or spoils is set by attributes. It holds to the comments of engine_core.proto wherever the test does not
tell it otherwise.
Owner: the test's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio

from fakes.fake_engine_session import FakeEngineSession
from fakes.fake_kv_feed import FakeKvFeed
from fakes.fake_pooling import HIDDEN_SIZE
from free_ports import free_port
from stepwire import grpc_options, tokenizer_archive
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc as pb_grpc
from stepwire.errors import StepwireError
from stepwire.grpc_errors import abort_with
from stepwire.v1 import common_pb2

_boot_numbers = itertools.count(1)
# For what should happen; a machine that is busy with other things takes its time.
WAIT_S = 30.0


class FakeEngine(pb_grpc.EngineCoreServiceServicer):
    """Start with `start`; ends by `stop` (clean), `kill` (as SIGKILL), `die` (EngineDead) or `drain`."""

    def __init__(
        self,
        tokenizer_dir: Path,
        *,
        engine_id: str = "fake-0",
        model: str = "fake-model",
        max_model_len: int = 4096,
        vocab_size: int = 100_000,
    ) -> None:
        self.archive = tokenizer_archive.build(tokenizer_dir)
        self.ready = pb.Ready(
            protocol=1,
            engine_id=engine_id,
            model=model,
            tokenizer_sha256=tokenizer_archive.sha256(self.archive),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            architecture="FakeForCausalLM",
            dtype="float32",
            kv_cache_dtype="float32",
            block_size=16,
            num_blocks=1 + max_model_len // 4,
            kv_cache_tokens=max_model_len * 4,
            max_num_seqs=64,
            max_logprobs=20,
            max_num_batched_tokens=2048,
            max_queued_requests=1024,
            max_queued_tokens=1_000_000,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            ping_interval_ms=5000,
            ping_timeout_ms=15000,
            state=common_pb2.ENGINE_STATE_RUNNING,
            version="0.1.0-fake",
            kv_cache_max_concurrency=4.0,
            embedding_dimensions=HIDDEN_SIZE,
            features=["pooling:last"],
        )
        # What the test may change at any time.
        self.answers_pings = True
        # The others may get their pongs without it.
        self.answers_step_loop_pings = True
        self.tokens_per_step = 1
        # Its monotonic clock is that of another machine.
        self.clock_ahead_ns = 0
        # What it says in its stats instead of the truth.
        self.stats = pb.SchedulerStats()
        # Called with each add; an error it returns becomes the REJECTED finish.
        self.reject: Callable[[pb.EngineCoreRequest], common_pb2.EngineError | None] = lambda request: None
        # Called with each scheduled request and the number of its next token; an error becomes the ERROR finish.
        self.fail: Callable[[pb.EngineCoreRequest, int], common_pb2.EngineError | None] = lambda request, index: None
        # Steps happen only while it is set.
        self.may_step = asyncio.Event()
        self.may_step.set()
        # Requests are queued, and QUEUED is reported, only while it is set.
        self.may_admit = asyncio.Event()
        self.may_admit.set()
        # Connect is answered only while it is set: the model is loaded.
        self.is_loaded = asyncio.Event()
        self.is_loaded.set()
        # What the test may look at.
        self.adds: list[pb.EngineCoreRequest] = []
        self.aborts: list[pb.AbortRequests] = []
        self.hellos: list[pb.Hello] = []
        self.goodbyes: list[pb.Goodbye] = []
        self.add_frames = 0
        self.sessions: list[FakeEngineSession] = []
        self.port = 0
        self._news = asyncio.Condition()
        self.kv_feed = FakeKvFeed()

    def monotonic_ns(self) -> int:
        """By its own clock."""
        return time.monotonic_ns() + self.clock_ahead_ns

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> FakeEngine:
        """Listen; every start is a new boot."""
        self.ready.boot_id = f"boot-{next(_boot_numbers)}"
        self._server = grpc.aio.server(options=grpc_options.SERVER)
        pb_grpc.add_EngineCoreServiceServicer_to_server(self, self._server)
        pb_grpc.add_KvEventsServiceServicer_to_server(self.kv_feed, self._server)
        # It must be able to come back to the same address.
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port or free_port()}")
        await self._server.start()
        return self

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[FakeEngine]:
        """Started inside, gone outside."""
        await self.start(port)
        try:
            yield self
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Let go of everything at once; safe to call twice."""
        await self._server.stop(None)

    async def kill(self) -> None:
        """All connections break without a word."""
        await self._server.stop(None)

    async def die(self, message: str = "boom", cause_type: str = "RuntimeError") -> None:
        """EngineDead on every stream, then the process is gone."""
        for session in self.sessions:
            session.die(message, cause_type)
        await asyncio.gather(*(session.over.wait() for session in self.sessions))
        await self._server.stop(None)

    def begin_drain(self) -> None:
        """ShutdownNotice on every stream; adds are refused from now on, streams end when their requests have."""
        self.ready.state = common_pb2.ENGINE_STATE_DRAINING
        for session in self.sessions:
            session.begin_drain()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; looked at after each frame from a frontend and each step."""
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(condition)

    async def tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(len(session.live) for session in self.sessions)

    # The service.

    async def Connect(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        first = await context.read()
        problem = self._check_first(first)
        if problem:
            await abort_with(context, problem)
        self.hellos.append(first.hello)
        await self.tell()
        await self.is_loaded.wait()
        session = FakeEngineSession(self, context)
        self.sessions.append(session)
        try:
            await session.run()
        finally:
            self.sessions.remove(session)
            session.over.set()
            await self.tell()

    def _check_first(self, first: object) -> StepwireError | None:
        if not isinstance(first, pb.ConnectRequest) or first.WhichOneof("message") != "hello":
            return StepwireError("the first message must be hello", reason="PROTOCOL_VIOLATION")
        hello = first.hello
        if not hello.protocol_min <= self.ready.protocol <= hello.protocol_max:
            return StepwireError(f"protocol {self.ready.protocol} is not among yours", reason="PROTOCOL_VERSION")
        if hello.expect_model not in ("", self.ready.model):
            text = f"the model is {self.ready.model}, not {hello.expect_model}"
            return StepwireError(text, reason="MODEL_MISMATCH")
        if hello.expect_tokenizer_sha256 not in ("", self.ready.tokenizer_sha256):
            return StepwireError("the tokenizer is another one", reason="TOKENIZER_MISMATCH")
        return None

    async def GetEngineInfo(
        self, request: pb.GetEngineInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetEngineInfoResponse:
        info = pb.Ready()
        info.CopyFrom(self.ready)
        if not self.is_loaded.is_set():
            info.state = common_pb2.ENGINE_STATE_STARTING
        return pb.GetEngineInfoResponse(ready=info)

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        pieces = range(0, len(self.archive), tokenizer_archive.CHUNK_BYTES)
        for start in pieces:
            data = self.archive[start : start + tokenizer_archive.CHUNK_BYTES]
            is_last = start == pieces[-1]
            await context.write(
                pb.GetTokenizerResponse(data=data, sha256=self.ready.tokenizer_sha256 if is_last else "")
            )
