"""The real engine process around the fake executor, and a frontend that speaks raw frames to it."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc

TIMEOUT_S = 30.0
EOS = 2


class RunningEngine:
    """One engine process on free ports, found in its log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._ports: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        # A pipe nobody reads would stop the engine when it is full.
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        ports = self._ports.get(timeout=TIMEOUT_S)
        assert ports is not None, f"the engine did not start: {''.join(self.log)}"
        self.port, self.metrics_port = ports
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = engine_core_pb2_grpc.EngineCoreServiceStub(self.channel)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listens on port (\d+), metrics on port (\d+)", line):
                self._ports.put((int(found[1]), int(found[2])))
        self._ports.put(None)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Exit code; the log is complete then."""
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    def metric(self, pattern: str) -> float:
        """Sum of the series whose name and labels match; there must be one at least."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as response:
            text = response.read().decode()
        values = re.findall(rf"^stepwire_engine_core_{pattern} (\S+)$", text, re.MULTILINE)
        assert values, f"no series {pattern}"
        return sum(map(float, values))

    def wait_for_metric(self, pattern: str, value: float) -> None:
        """Return when it has this value: the engine publishes after its step, and not after each.

        Raises AssertionError with the last value after TIMEOUT_S seconds.
        """
        give_up, pause = time.monotonic() + TIMEOUT_S, threading.Event()
        while (found := self.metric(pattern)) != value:
            assert time.monotonic() < give_up, f"{pattern} is still {found} and not {value} after {TIMEOUT_S:g} s"
            pause.wait(0.01)

    def connect(self, session_id: str = "session", **hello: object) -> EngineStream:
        stream = EngineStream(self.stub)
        stream.send(hello=pb.Hello(**{**HELLO, "session_id": session_id, **hello}))  # type: ignore[arg-type]
        return stream


HELLO: dict[str, object] = {"protocol_min": 1, "protocol_max": 1, "client_id": "test"}


@contextmanager
def running_engine(*flags: str, module: str = "fakes.fake_engine_process") -> Iterator[RunningEngine]:
    """An engine with these flags; it is killed at the end if it still runs. `module` may be another way to start it."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--port", "0", "--metrics-port", "0", *flags],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Leaving the `with` closes the pipes, so the reader of the log must be through by then.
    with process:
        try:
            engine = RunningEngine(process)
            yield engine
            engine.channel.close()
        finally:
            process.kill()
        engine.wait()


class EngineStream:
    """A Connect stream: frames out through a queue, frames in one by one or until something holds."""

    def __init__(self, stub: engine_core_pb2_grpc.EngineCoreServiceStub) -> None:
        self._outgoing: queue.SimpleQueue[pb.ConnectRequest | None] = queue.SimpleQueue()
        self.call = stub.Connect(iter(self._outgoing.get, None), wait_for_ready=True, timeout=TIMEOUT_S)
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, pb.Finish] = {}
        self.frames: list[pb.ConnectResponse] = []
        self._last_batch = 0

    def send(self, **message: object) -> None:
        self._outgoing.put(pb.ConnectRequest(**message))  # type: ignore[arg-type]

    def half_close(self) -> None:
        self._outgoing.put(None)

    def add(self, *requests: pb.EngineCoreRequest) -> None:
        self.send(add=pb.AddRequests(requests=requests))

    def abort(self, *handles: int) -> None:
        self.send(abort=pb.AbortRequests(handles=handles, reason=pb.ABORT_REASON_CLIENT_CANCELLED))

    def next(self) -> pb.ConnectResponse:
        """The next frame; its outputs are checked and collected."""
        frame: pb.ConnectResponse = next(self.call)
        self.frames.append(frame)
        if frame.HasField("outputs"):
            self._collect(frame.outputs)
        return frame

    def until(self, is_done: Callable[[pb.ConnectResponse], object]) -> pb.ConnectResponse:
        """Read until a frame satisfies `is_done`; returns that frame."""
        while True:
            frame = self.next()
            if is_done(frame):
                return frame

    def until_finished(self, *handles: int) -> None:
        if not set(handles) <= set(self.finishes):
            self.until(lambda _: set(handles) <= set(self.finishes))

    def rest(self) -> grpc.StatusCode:
        """Read to the end; returns the status of the stream."""
        try:
            while True:
                self.next()
        except (StopIteration, grpc.RpcError):
            return self.call.code()

    def dump_state(self) -> pb.UtilityResult:
        self.send(utility=pb.UtilityCall(call_id=1, dump_state={"include_requests": True}))  # type: ignore[arg-type]
        return self.until(lambda frame: frame.HasField("utility_result")).utility_result

    def _collect(self, outputs: pb.EngineCoreOutputs) -> None:
        assert outputs.batch_seq == self._last_batch + 1, "a gap in the batches"
        self._last_batch = outputs.batch_seq
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
            self._add_tokens(handle, [token_id])
        for output in outputs.outputs:
            self._add_tokens(output.handle, output.new_token_ids)
            if output.HasField("finish"):
                self.finishes[output.handle] = output.finish

    def _add_tokens(self, handle: int, token_ids: list[int]) -> None:
        assert handle not in self.finishes, f"news of {handle} after its finish"
        self.tokens.setdefault(handle, []).extend(token_ids)


def engine_request(handle: int, prompt: list[int], max_tokens: int = 5, **fields: object) -> pb.EngineCoreRequest:
    """A greedy request with every promise of the contract kept, unless `fields` break one."""
    defaults: dict[str, object] = {
        "handle": handle,
        "request_id": f"request-{handle}",
        "prompt_token_ids": token_array.pack(prompt),
        "sampling": pb.EngineSamplingParams(top_p=1, repetition_penalty=1),
        "max_tokens": max_tokens,
        "eos_token_ids": [EOS],
    }
    return pb.EngineCoreRequest(**{**defaults, **fields})  # type: ignore[arg-type]
