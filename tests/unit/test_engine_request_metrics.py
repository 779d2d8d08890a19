"""What an engine serves about requests that fail."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import engine_core
from engine_core.core_proc import REJECT_REASONS
from engine_core.metrics import EngineView, requests
from engine_core.metrics.requests import ERROR_REASONS
from fakes.looped_engine import LoopedEngine
from stepwire.grpc_errors import REASONS

# Where requests are refused; the rest of the engine ends those that it has taken.
REFUSING = ("core_proc.py", "protocol_check.py", "scheduler/admission.py")


def errors_of(engine: LoopedEngine) -> dict[str, float]:
    view = EngineView("engine", engine.lifecycle, SimpleNamespace(), SimpleNamespace(), proc=engine.proc)
    (family,) = (one for one in requests.collect(view) if one.name.endswith("request_errors"))
    return {sample.labels["reason"]: sample.value for sample in family.samples}


def test_every_reason_to_refuse_is_there_before_anything_was_refused() -> None:
    sources = [(Path(engine_core.__file__).parent / name).read_text() for name in REFUSING]
    given = {reason for source in sources for reason in re.findall(r'RequestError\(\s*"([A-Z_]+)"', source)}
    assert given == set(REJECT_REASONS) == set(LoopedEngine().proc.num_rejected.snapshot())
    assert given <= set(REASONS)


def test_every_reason_to_fail_is_there_before_anything_has_failed() -> None:
    assert errors_of(LoopedEngine()) == dict.fromkeys(ERROR_REASONS, 0)


def test_a_reason_that_is_counted_in_two_places_is_their_sum() -> None:
    engine = LoopedEngine()
    engine.proc.num_unreadable.add("REQUEST_FAILED", 2)
    engine.scheduler.counters.errors.update({"REQUEST_FAILED": 3, "DEADLINE": 1})
    assert errors_of(engine) == {**dict.fromkeys(ERROR_REASONS, 0), "REQUEST_FAILED": 5, "DEADLINE": 1}
