"""A server with a certificate and tokens: each client trusts the CA it is given, and sends its token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from conformance import runners
from conformance.error_worlds import RICH, World, world_of

pytestmark = pytest.mark.slow

REQUEST = {"text": "a b", "stop": {"max_tokens": 2}}


class Files:
    """The server's certificate, and CAs: its own and another."""

    def __init__(self, directory: Path) -> None:
        self.ca, self.other_ca, self.cert, self.key = (
            directory / name for name in ("ca.pem", "other-ca.pem", "cert.pem", "key.pem")
        )
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost", "127.0.0.1")
        authority.cert_pem.write_to_path(str(self.ca))
        trustme.CA().cert_pem.write_to_path(str(self.other_ca))
        certificate.private_key_pem.write_to_path(str(self.key))
        self.cert.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
async def world(files: Files, tmp_path: Path) -> AsyncIterator[World]:
    async with world_of("guarded", tmp_path, tls_cert_file=files.cert, tls_key_file=files.key) as world:
        yield world


@pytest.mark.parametrize("name", runners.RUNNERS)
async def test_who_is_let_in(world: World, files: Files, name: str):
    async def codes(ca_file: Path | None, token: str) -> list[tuple[str, str]]:
        target = f"localhost:{world.frontend.process.port}"
        with runners.start(name, target, ca_file=str(ca_file or ""), token=token) as runner:
            calls = [
                await world.call(runner, method, request)
                for method, request in (
                    ("GenerationService/GenerateStream", REQUEST),
                    ("ModelService/ListModels", {}),
                )
            ]
        return [(reply.code, reply.reason) for reply in calls]

    good, without_token, untrusted, in_clear = await asyncio.gather(
        codes(files.ca, RICH), codes(files.ca, ""), codes(files.other_ca, RICH), codes(None, RICH)
    )
    assert good == [("OK", "")] * 2
    assert without_token == [("UNAUTHENTICATED", "UNAUTHENTICATED")] * 2
    assert untrusted == [("UNAVAILABLE", "")] * 2
    assert in_clear == [("UNAVAILABLE", "")] * 2
