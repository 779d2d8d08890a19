"""The end of a certificate, compared with what a library reads out of the same file."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from stepwire.certificate_expiry import expiry_of, watch_expiry

# After 2049 a certificate writes its years with four digits.
ENDS = (datetime(2027, 3, 4, 5, 6, 7, tzinfo=UTC), datetime(2061, 1, 2, tzinfo=UTC))


def certificate(end: datetime) -> bytes:
    pem: bytes = trustme.CA().issue_cert("localhost", not_after=end).cert_chain_pems[0].bytes()
    return pem


@pytest.mark.parametrize("end", ENDS)
def test_the_date_is_the_one_in_the_certificate(end: datetime) -> None:
    pem = certificate(end)
    assert x509.load_pem_x509_certificate(pem).not_valid_after_utc == end
    assert expiry_of("some text before it\n" + pem.decode() + certificate(ENDS[0]).decode()) == end.timestamp()


@pytest.mark.parametrize("pem", ["", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_a_value_error(pem: str) -> None:
    with pytest.raises(ValueError, match="not a certificate"):
        expiry_of(pem)


def test_a_file_that_changes_is_read_again_and_one_that_is_broken_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chain.pem"
    path.write_bytes(certificate(ENDS[0]))
    expiry = watch_expiry(path)
    assert expiry() == ENDS[0].timestamp()
    path.write_text("half of a")
    os.utime(path, ns=(1, 1))
    assert expiry() == ENDS[0].timestamp()
    path.write_bytes(certificate(ENDS[1]))
    os.utime(path, ns=(2, 2))
    assert expiry() == ENDS[1].timestamp()
