"""Responses of any operation as tables a person can read."""

from __future__ import annotations

import pytest

from stepwire.v1 import admin_service_pb2 as pb
from stepwire_client import cli_admin_tables


def cells(text: str) -> list[list[str]]:
    """Rows of all tables, headings included."""
    lines = [line.replace("┃", "│") for line in text.splitlines()]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


def shown(response: object, capsys: pytest.CaptureFixture[str]) -> str:
    cli_admin_tables.print_response(response)
    return capsys.readouterr().out


def test_enums_and_lists_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    response = pb.IsSleepingResponse()
    response.results["b"].sleeping = True
    response.results["b"].level = 2
    response.results["b"].asleep.extend([1, 3])
    response.results["a"].SetInParent()
    assert cells(shown(response, capsys)) == [
        ["engine", "sleeping", "level", "asleep"],
        ["a", "false", "-", "-"],
        ["b", "true", "offload weights", "weights, scheduling"],
    ]


def test_a_list_of_messages_is_a_table_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    response = pb.CheckHealthResponse()
    response.results["a"].workers.add(rank=1, message="device lost [gone]")
    assert cells(shown(response, capsys)) == [
        ["engine", "healthy"],
        ["a", "false"],
        ["engine", "rank", "healthy", "message"],
        ["a", "1", "false", "device lost [gone]"],
    ]


def test_many_fields_are_rows_and_no_word_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    response = pb.DumpStateResponse()
    for engine_id in ("host:50061", "host:50062"):
        dump = response.results[engine_id]
        dump.boot_id = "5fa0c6f2c4b94b3c90a1d7c0d9a1b2c3"
        dump.requests.add(request_id="90a1d7c0d9a1b2c35fa0c6f2c4b94b3c", status="PREEMPTED", preemptions=2)
    text = shown(response, capsys)
    assert ["", "host:50061", "host:50062"] in cells(text)
    assert ["boot id", dump.boot_id, dump.boot_id] in cells(text)
    assert text.count("90a1d7c0d9a1b2c35fa0c6f2c4b94b3c") == 2
    assert text.count("PREEMPTED") == 2


def test_stacks_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    response = pb.DumpStateResponse()
    response.results["a"].thread_stacks = "main:\n  File x\n"
    assert "thread stacks of a:\nmain:\n  File x\n" in shown(response, capsys)


def test_a_response_without_engines_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    response = pb.GetDrainStatusResponse(draining=True, requests_in_flight=2)
    assert cells(shown(response, capsys)) == [["draining", "requests in flight", "remaining ms"], ["true", "2", "0"]]
    assert not cli_admin_tables.has_errors(response)


def test_failures_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    response = pb.ResumeResponse()
    response.errors["a"].reason = "PAUSE_PENDING"
    response.errors["a"].message = "a pause is still pending"
    cli_admin_tables.print_response(response)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: engine a: PAUSE_PENDING: a pause is still pending\n")
    assert cli_admin_tables.has_errors(response)
