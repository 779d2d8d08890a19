"""The engine core as the frontend's half of this process sees it: requests in, outputs out, and no stream between.

Owner: the caller's thread, which turns the loop with `get_output`. Both ends of the wire are used back to back, so that
requests, outputs and deaths mean here exactly what they mean to the service; only the bytes are left out.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import weakref
from collections.abc import Sequence

from engine_core.config import EngineSettings
from engine_core.core import EngineCore
from engine_core.death import describe_death
from engine_core.lifecycle import EngineLifecycle
from engine_core.model_executor.executor import ExecutorFailedError
from engine_core.request_wire import decode_request
from engine_core.scheduler.output import EngineCoreOutput, EngineCoreOutputs, Finish, FinishReason
from engine_core.startup import ModelLoader, start_engine
from engine_core.step_progress import StepProgress
from engine_core.wire import FrameEncoder
from frontend.abort_kind import AbortKind
from frontend.engine_client.wire import to_death, to_facts, to_outputs
from frontend.engine_outputs import EngineOutput
from frontend.input_processor import ProcessedRequest
from stepwire.engine.v1 import engine_core_pb2
from stepwire.errors import EngineDeadError

logger = logging.getLogger(__name__)

_SESSION = "offline"
# A compile that takes too long is noticed this much later; one that ends is noticed at once.
_COMPILE_CHECK_S = 1.0


class InprocClient:
    """One engine core. `close`, or dropping the last reference, gives everything back that it holds."""

    def __init__(self, settings: EngineSettings, loader: ModelLoader) -> None:
        # Lists and events go to the engine and not `self`: it must not keep its client alive.
        self._executor_failures: list[BaseException] = []
        self._has_grammar = threading.Event()
        self._death: EngineDeadError | None = None
        # Outputs of adds and aborts, handed out with the next step.
        self._outputs: list[EngineCoreOutput] = []
        started = start_engine(settings, loader, self._executor_failures.append, _nobody_waits_for_this, time.monotonic)
        self._core: EngineCore | None = started.core
        self._close = weakref.finalize(self, _release, started.core)
        if started.core.structured_output is not None:
            started.core.structured_output.wake_up = self._has_grammar.set
        self._encoder = FrameEncoder(
            _SESSION,
            _SESSION,
            EngineLifecycle(),
            StepProgress(time.monotonic),
            time.monotonic,
            ping_interval_ms=settings.ping_interval_ms,
            ping_timeout_ms=settings.ping_timeout_ms,
            data_parallel_rank=0,
            data_parallel_size=1,
            tensor_parallel_size=settings.tensor_parallel_size,
            pipeline_parallel_size=settings.pipeline_parallel_size,
            is_tracing=False,
            num_frontends=_one_frontend,
        )
        self.facts = to_facts(self._encoder.ready(started.core.config))
        self.tokenizer_archive = started.tokenizer_archive

    def close(self) -> None:
        """Give memory and threads back; what still runs is lost. May be repeated."""
        self._core = None
        self._close()

    @property
    def has_work(self) -> bool:
        """`get_output` has something to do; at the end of requests that is to tell the workers of it."""
        return self._core is not None and (bool(self._outputs) or self._core.has_work)

    def add_request(self, processed: ProcessedRequest, handles: Sequence[int]) -> None:
        """Queue every choice. A refusal comes as its output. Raises EngineDeadError."""
        core = self._running()
        for choice, handle in enumerate(handles):
            message = engine_core_pb2.EngineCoreRequest()
            processed.fill(choice, message, handle, time.monotonic())
            request = decode_request(_SESSION, message, core.clock())
            error = core.preprocess_add_request(request)
            if error is None:
                output = core.add_request(request)
            else:
                output = EngineCoreOutput(request.key, finish=Finish(FinishReason.REJECTED, error=error))
            if output is not None:
                self._outputs.append(output)

    def abort(self, handles: Sequence[int], kind: AbortKind) -> None:
        """End requests; unknown ones, and all of an engine that is dead or closed, are skipped."""
        if self._core is not None and handles:
            self._outputs += self._core.abort_requests([(_SESSION, handle) for handle in handles], kind.value)

    def get_output(self) -> list[EngineOutput]:
        """Step the engine; no news may come although work goes on. Raises EngineDeadError.

        Whatever leaves a step in the middle ends the engine, also Ctrl-C: its state can not be trusted any more.
        """
        core = self._running()
        try:
            outputs = self._step(core)
        except BaseException as error:
            death = self._die(core, error)
            if isinstance(error, Exception):
                raise death from error
            raise
        if not outputs:
            return []
        batch = EngineCoreOutputs(core.num_steps, core.clock(), outputs)
        return to_outputs(self._encoder.encode(batch, 0, set).outputs)

    def _step(self, core: EngineCore) -> list[EngineCoreOutput]:
        if self._executor_failures:
            raise ExecutorFailedError(str(self._executor_failures[0])) from self._executor_failures[0]
        if core.structured_output is not None and core.structured_output.num_pending:
            core.structured_output.expire()
        outputs, self._outputs = self._outputs, []
        self._has_grammar.clear()
        if core.is_blocked:
            if not outputs:
                self._has_grammar.wait(_COMPILE_CHECK_S)
            return outputs
        return outputs + core.step()[0]

    def _running(self) -> EngineCore:
        if self._death is not None:
            # Raised itself again and again, it would collect the frames of all who met it.
            raise copy.copy(self._death)
        if self._core is None:
            raise RuntimeError("the engine was closed")
        return self._core

    def _die(self, core: EngineCore, error: BaseException) -> EngineDeadError:
        dead = describe_death(error, core.num_steps)
        logger.critical("ENGINE_CORE_DEAD %s", dead)
        self._death = to_death(self._encoder.encode(dead, 0, set).engine_dead)
        self.close()
        return copy.copy(self._death)


def _nobody_waits_for_this() -> None:
    """The model is loaded; the caller waits for all of the start anyway."""


def _one_frontend() -> int:
    return 1


def _release(core: EngineCore) -> None:
    core.shutdown()
    gc.unfreeze()
