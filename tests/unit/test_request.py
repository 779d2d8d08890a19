"""Request: the state table, written down a second time, and the arithmetic of known tokens."""

from __future__ import annotations

import itertools

import pytest

from engine_core.scheduler.request import FINISHED, Request, RequestStatus
from fakes.request_factory import make_request
from stepwire.errors import InvariantViolation

ENDS = {status for status in RequestStatus if status.name.startswith("FINISHED_")}
LEGAL = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_GRAMMAR} | ENDS,
    RequestStatus.WAITING_FOR_GRAMMAR: {RequestStatus.WAITING} | ENDS,
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED} | ENDS,
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING} | ENDS,
}
PAIRS = list(itertools.product(RequestStatus, RequestStatus))


def name_of(value: object) -> str:
    return value.name if isinstance(value, RequestStatus) else str(value)


def request_in(status: RequestStatus) -> Request:
    return make_request(1, 3, status=status)


def test_every_end_of_the_specification_exists() -> None:
    names = {"STOPPED", "LENGTH_CAPPED", "ABORTED", "ERROR", "REPETITION", "REJECTED"}
    assert {status.name for status in ENDS} == {f"FINISHED_{name}" for name in names}


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair[1] in LEGAL.get(pair[0], ())], ids=name_of)
def test_legal_transition(old: RequestStatus, new: RequestStatus) -> None:
    request = request_in(old)
    request.set_status(new)
    assert request.status is new
    assert (request.status in FINISHED) == (new in ENDS)


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair[1] not in LEGAL.get(pair[0], ())], ids=name_of)
def test_illegal_transition_raises_and_changes_nothing(old: RequestStatus, new: RequestStatus) -> None:
    request = request_in(old)
    with pytest.raises(InvariantViolation, match=f"{old.name} -> {new.name}"):
        request.set_status(new)
    assert request.status is old


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("length", range(4))
def test_token_slices_run_over_prompt_and_output(start: int, length: int) -> None:
    request = make_request(1, [1, 2, 3], output_token_ids=[4, 5, 6])
    assert request.token_ids(start, start + length) == [1, 2, 3, 4, 5, 6][start : start + length]


def test_counts() -> None:
    request = make_request(1, 5, max_tokens=7, output_token_ids=[1, 2])
    assert request.num_prompt_tokens == 5
    assert request.num_tokens == 7
    # Resumed tokens are part of max_tokens.
    assert request.max_num_tokens == 12
    assert request.num_resumed_tokens == 2
    request.output_token_ids.append(3)
    assert request.num_tokens == 8
    assert request.num_resumed_tokens == 2
