"""An EngineCoreProc in the test's own thread: each `turn` is one turn of its busy loop that does not wait.

Real scheduler, utilities and queues around the fake executor, under a clock that the test moves. Steps are synchronous
unless the test asks for more: then a turn may only start one, as far as the device thread has come.
"""

from __future__ import annotations

import time
from pathlib import Path

from engine_core.config import EngineSettings
from engine_core.core_proc import EngineCoreProc
from engine_core.kv_event_feed import KVEventFeed
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.messages import Add, OutputMessage, UtilityCall, UtilityResult, WakeUp
from engine_core.operations import Operation, OperationResult
from engine_core.output_queue import OutputQueue
from engine_core.resolved_config import ServedModel
from engine_core.scheduler.output import EngineCoreOutputs, Finish
from engine_core.scheduler.request import Request, SamplingParams, StopConditions
from engine_core.scheduler.request_error import RequestError
from engine_core.startup import LoadedModel, start_engine
from engine_core.step_progress import StepProgress
from fakes.fake_executor import FakeExecutor

SESSION = "session"


class LoopedEngine:
    """Calls in, turns of the loop, what came out."""

    def __init__(
        self,
        profile_dir: Path | None = None,
        kv_event_feed: KVEventFeed | None = None,
        model_dir: Path = Path(),
        **settings: object,
    ) -> None:
        self.now = 0.0
        defaults: dict[str, object] = {
            "num_blocks": 64,
            "block_size": 4,
            "max_model_len": -1,
            "async_scheduling": False,
        }
        engine_settings = EngineSettings(**{**defaults, **settings})  # type: ignore[arg-type]
        self.executor = FakeExecutor(engine_settings, lambda error: None)
        loaded = LoadedModel(self.executor, ServedModel("fake", "", "", "at-start", model_dir), b"")
        started = start_engine(engine_settings, lambda *_: loaded, lambda _: None, lambda: None, lambda: self.now)
        self.lifecycle = EngineLifecycle()
        for state in (EngineState.WARMING_UP, EngineState.RUNNING):
            self.lifecycle.move_to(state)
        output_queue = OutputQueue(lambda: self.now)
        self.outbox = output_queue.attach(SESSION)
        self.drains: list[tuple[float | None, str]] = []
        self.proc = EngineCoreProc(
            started.core,
            output_queue,
            self.lifecycle,
            StepProgress(time.monotonic),
            lambda: self.now,
            profile_dir=profile_dir,
            drain=lambda timeout_s, reason: self.drains.append((timeout_s, reason)),
            kv_event_feed=kv_event_feed,
        )
        self.results: dict[int, OperationResult | RequestError] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.outputs: list[EngineCoreOutputs] = []
        self._num_calls = 0

    @property
    def state(self) -> EngineState:
        return self.lifecycle.state

    @property
    def scheduler(self):
        return self.proc.core.scheduler

    def add(self, handle: int, num_prompt: int = 6, max_tokens: int = 5, **fields: object) -> None:
        request = Request(
            key=(SESSION, handle),
            request_id=f"request-{handle}",
            prompt_token_ids=[10 + handle] * num_prompt,
            sampling=SamplingParams(),
            stop=StopConditions(max_tokens=max_tokens),
            arrival_time=self.now,
            **fields,  # type: ignore[arg-type]
        )
        assert self.proc.core.preprocess_add_request(request) is None
        self.proc.input_queue.put(Add([request]))

    def send(self, operation: Operation, deadline: float | None = None) -> int:
        """Put a call on the queue; returns its id."""
        self._num_calls += 1
        self.proc.input_queue.put(UtilityCall(SESSION, self._num_calls, operation, deadline))
        return self._num_calls

    def call(self, operation: Operation) -> OperationResult | RequestError:
        """Its answer, which must come within three turns of an engine that has nothing else to do."""
        call_id = self.send(operation)
        self.turn(3)
        return self.results[call_id]

    def turn(self, num: int = 1) -> None:
        """What the busy loop does, with a wake-up so that it never waits."""
        for _ in range(num):
            self.proc.input_queue.put(WakeUp())
            self.proc._process_input_queue()
            if self.proc.core.has_work:
                self.proc._process_step()
        self._collect()

    def wait(self) -> None:
        """A turn that waits for the next deadline, which must have come by the test's clock."""
        self.proc._process_input_queue()
        if self.proc.core.has_work:
            self.proc._process_step()
        self._collect()

    def run(self) -> None:
        """Turn until nothing is left to do."""
        self.turn()
        while self.proc.core.has_work:
            self.turn()

    def _collect(self) -> None:
        for waiting in list(self.outbox._waiting):
            self._take(waiting.item)
        self.outbox._waiting.clear()

    def _take(self, message: OutputMessage) -> None:
        if isinstance(message, UtilityResult):
            assert message.call_id not in self.results, "a second answer"
            self.results[message.call_id] = message.outcome
        elif isinstance(message, EngineCoreOutputs):
            self.outputs.append(message)
            for output in message.outputs:
                handle = output.key[1]
                assert handle not in self.finishes, f"news of {handle} after its finish"
                self.tokens.setdefault(handle, []).extend(output.new_token_ids)
                if output.finish is not None:
                    self.finishes[handle] = output.finish
