"""The error table and the rich statuses made from it."""

from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2

from stepwire import grpc_errors
from stepwire.errors import (
    EngineDeadError,
    FieldViolation,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    StepwireError,
    UnavailableError,
)

Code = grpc.StatusCode


def details(error: StepwireError, **metadata: str | int):
    found = {}
    for packed in grpc_errors.to_status(error, **metadata).details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    return found


@pytest.mark.parametrize(
    ("error", "code", "is_retryable"),
    [
        (InvalidRequestError("x"), Code.INVALID_ARGUMENT, False),
        (InvalidRequestError("x", reason="MODEL_NOT_FOUND"), Code.NOT_FOUND, False),
        (InvalidRequestError("x", reason="DUPLICATE_REQUEST"), Code.ALREADY_EXISTS, False),
        (InvalidRequestError("x", reason="UNSUPPORTED_FEATURE"), Code.UNIMPLEMENTED, False),
        (OverloadedError("x"), Code.RESOURCE_EXHAUSTED, True),
        (OverloadedError("x", reason="SLOW_CLIENT"), Code.RESOURCE_EXHAUSTED, False),
        (UnavailableError("x"), Code.UNAVAILABLE, True),
        (EngineDeadError("x"), Code.UNAVAILABLE, True),
        (RequestFailedError("x"), Code.INTERNAL, True),
        (RequestFailedError("x", retryable=False), Code.INTERNAL, False),
        (RequestFailedError("x", reason="KV_CAPACITY"), Code.FAILED_PRECONDITION, False),
        (RequestFailedError("x", reason="DEADLINE"), Code.DEADLINE_EXCEEDED, False),
        (RequestFailedError("x", reason="NEW_ONE"), Code.INTERNAL, True),
    ],
)
def test_table(error: StepwireError, code: grpc.StatusCode, is_retryable: bool):
    status = grpc_errors.to_status(error)
    assert status.code == code.value[0]
    info = details(error)["ErrorInfo"]
    assert (info.reason, info.domain) == (error.reason, "stepwire")
    assert info.metadata["retryable"] == str(is_retryable).lower()


def test_metadata_of_error_and_call_are_joined_and_empty_ones_left_out():
    error = EngineDeadError("x", kind="reported", cause="OUT_OF_MEMORY")
    info = details(error, request_id="r1", tokens_emitted=0)["ErrorInfo"]
    assert info.metadata["cause"] == "OUT_OF_MEMORY"
    assert info.metadata["request_id"] == "r1"
    assert info.metadata["tokens_emitted"] == "0"
    assert "boot_id" not in info.metadata


def test_violations_and_retry_advice():
    violations = (FieldViolation("a.b", "too large"), FieldViolation("c", "empty"))
    found = details(InvalidRequestError("x", violations=violations))
    assert [(item.field, item.description) for item in found["BadRequest"].field_violations] == [
        ("a.b", "too large"),
        ("c", "empty"),
    ]
    assert "RetryInfo" not in found
    assert details(OverloadedError("x", retry_after_ms=1500))["RetryInfo"].retry_delay.ToMilliseconds() == 1500


def test_trailers_carry_pushback_and_stay_small():
    plain = dict(grpc_errors.trailers(InvalidRequestError("x" * 100_000)))
    assert len(plain["grpc-status-details-bin"]) < 4096
    assert "grpc-retry-pushback-ms" not in plain
    assert dict(grpc_errors.trailers(OverloadedError("x", retry_after_ms=70)))["grpc-retry-pushback-ms"] == "70"


@pytest.mark.parametrize("text", ["x" * 100_000, "é" * 5000, "😀" * 5000, "%" * 5000, "a" * 511 + "😀"])
def test_no_text_and_no_number_of_violations_makes_trailers_too_large(text: str):
    violations = tuple(FieldViolation(text, text) for _ in range(200))
    error = InvalidRequestError(text, violations=violations, metadata={"key": text})
    [details_bin] = [value for key, value in grpc_errors.trailers(error, request_id=text) if key.endswith("-bin")]
    num_message_bytes = len(quote(grpc_errors.cut(text, grpc_errors.MAX_MESSAGE_BYTES)))
    assert num_message_bytes <= grpc_errors.MAX_MESSAGE_BYTES
    # Binary metadata travels in base64.
    assert num_message_bytes + len(details_bin) * 4 / 3 < 4096
    assert details(error)["BadRequest"].field_violations


def test_cut_keeps_what_fits_and_never_half_a_character():
    assert grpc_errors.cut("short", 10) == "short"
    assert grpc_errors.cut("abcé", 8) == "abc"
    assert grpc_errors.cut("abcé", 9) == "abcé"
