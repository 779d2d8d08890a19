"""Requests and engine outputs for tests of the output half, with everything filled that a test does not care about."""

from __future__ import annotations

from dataclasses import replace

from frontend.abort_kind import AbortKind
from frontend.engine_outputs import EngineEvent, EngineFinish, EngineFinishReason, EngineOutput
from frontend.input_processor import OutputSettings, ProcessedRequest
from stepwire.engine.v1 import engine_core_pb2

_DEFAULT = ProcessedRequest(
    request_id="r",
    model="m",
    prompt_token_ids=[2],
    prompt_text=None,
    num_choices=1,
    seed=1,
    max_tokens=1000,
    min_tokens=0,
    stop_strings=(),
    include_stop=False,
    eos_token_ids=(0,),
    resume_output_token_ids=[],
    output=OutputSettings(token_ids=True),
    arrival_time=0.0,
    deadline=None,
    queue_deadline=None,
    template=engine_core_pb2.EngineCoreRequest(),
)


def make_request(output: dict[str, object] | None = None, **changes: object) -> ProcessedRequest:
    """A request that differs from the plain one as said; `output` changes its OutputSettings."""
    settings = replace(_DEFAULT.output, **(output or {}))  # type: ignore[arg-type]
    return replace(_DEFAULT, output=settings, **changes)  # type: ignore[arg-type]


def tokens(handle: int, *token_ids: int, stamp: int = 0) -> EngineOutput:
    return EngineOutput(handle, token_ids, monotonic_ns=stamp)


def queued(handle: int) -> EngineOutput:
    return EngineOutput(handle, events=((EngineEvent.QUEUED, 1),))


def finish(handle: int, reason: EngineFinishReason, *token_ids: int, stop_token_id: int | None = None) -> EngineOutput:
    return EngineOutput(handle, token_ids, EngineFinish(reason, stop_token_id=stop_token_id))


class AbortLog:
    """An `on_abort` that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], AbortKind]] = []

    def __call__(self, handles: list[int], kind: AbortKind) -> None:
        self.calls.append((list(handles), kind))
