"""When the certificate in a PEM file ends. Reads the one date it needs out of the DER; checks nothing else."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0x17, 0x18
_VERSION = 0xA0
_END = "-----END CERTIFICATE-----"
# In a certificate: serial number, signature algorithm and issuer come before the validity.
_FIELDS_BEFORE_VALIDITY = 3


def expiry_of(pem: str) -> float:
    """Unix time at which the first certificate ends. Raises ValueError for anything else."""
    first, end, _ = pem.partition(_END)
    start = first.find("-----BEGIN CERTIFICATE-----")
    try:
        return _expiry_of_der(ssl.PEM_cert_to_DER_cert(first[start:] + end))
    except (ValueError, IndexError) as error:
        raise ValueError(f"not a certificate: {error}") from None


def watch_expiry(path: Path) -> Callable[[], float]:
    """Reads the file again when it has changed; as long as it can not be read, what was known stays."""
    known: tuple[int, float] = (-1, 0.0)

    def expiry() -> float:
        nonlocal known
        try:
            stamp = path.stat().st_mtime_ns
            if stamp != known[0]:
                known = (stamp, expiry_of(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            # Written to just now: the next scrape looks again.
            return known[1]
        return known[1]

    return expiry


def _expiry_of_der(der: bytes) -> float:
    _, certificate, _ = _element(der)
    _, fields, _ = _element(certificate)
    if fields[0] == _VERSION:
        _, _, fields = _element(fields)
    for _ in range(_FIELDS_BEFORE_VALIDITY):
        _, _, fields = _element(fields)
    tag, validity, _ = _element(fields)
    if tag != _SEQUENCE:
        raise ValueError("it has no validity")
    _, _, behind_begin = _element(validity)
    kind, end, _ = _element(behind_begin)
    return _time(kind, end.decode("ascii"))


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag and content of the first element, and what follows it."""
    tag, length, start = data[0], data[1], 2
    if length & 0x80:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("it is cut off")
    return tag, data[start : start + length], data[start + length :]


def _time(kind: int, text: str) -> float:
    if kind == _UTC_TIME:
        # Two digits of the year: 50 and more are of the century before.
        text = ("19" if text[:2] >= "50" else "20") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError("its end is no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
