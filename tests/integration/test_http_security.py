"""Tokens and TLS at the HTTP port: the same gate, the same certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2
import pytest
import trustme

from fakes.fake_engine import FakeEngine
from free_ports import free_port
from frontend.api.openai_http import call
from frontend.api.openai_http.call import MAX_BODY_BYTES
from running_frontend import SERVING, running_frontend

TOKENS = """
[tokens.alice]
token = "alice-0123456789abcdef"
class = "gold"
[tokens.bob]
token = "bob-0123456789abcdef"
requests_per_minute = 1
[tokens.eve]
token = "eve-0123456789abcdef"
models = ["another-model"]
"""
PROMPT = {"model": "fake-model", "prompt": "hello", "max_tokens": 2}
MESSAGES = {"model": "fake-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-0123456789abcdef"}


@pytest.fixture
async def http(engine: FakeEngine, tmp_path: Path):
    (tmp_path / "tokens.toml").write_text(TOKENS)
    port = free_port()
    settings = {"token_file": tmp_path / "tokens.toml", "http_port": port}
    async with (
        running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **settings) as running,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        await running.wait_for_health(SERVING)
        yield client


async def test_without_a_good_token_every_route_is_closed(http: httpx2.AsyncClient, engine: FakeEngine):
    for headers in ({}, {"authorization": "Bearer unknown"}):
        for response in (
            await http.post("/v1/completions", json=PROMPT, headers=headers),
            await http.post("/v1/completions", json={**PROMPT, "stream": True}, headers=headers),
            await http.post("/v1/chat/completions", json=MESSAGES, headers=headers),
            await http.post("/v1/embeddings", json={"input": "hello"}, headers=headers),
            await http.post("/tokenize", json={"prompt": "hello"}, headers=headers),
            await http.post("/detokenize", json={"tokens": [1]}, headers=headers),
            await http.get("/v1/models", headers=headers),
            await http.get("/v1/models/fake-model", headers=headers),
        ):
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
            assert "unknown" not in response.text
    assert engine.adds == []
    # For probes and browsers, and nobody's business.
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "v1/embeddings", "tokenize", "detokenize"])
async def test_a_strangers_body_is_not_looked_at(http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str):
    parsed: list[object] = []
    monkeypatch.setattr(call, "_parse", lambda *given: parsed.append(given))
    for body in (b"{", b'{"prompt": 5}', b'{"prompt": [' + b'"a",' * 100_000 + b'"a"]}', b" " * (MAX_BODY_BYTES + 1)):
        response = await http.post(f"/{path}", content=body)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthenticated")
    assert parsed == []


async def test_a_token_lets_in_with_its_class(http: httpx2.AsyncClient, engine: FakeEngine):
    claimed = {**bearer("alice"), "x-gateway-inference-fairness-id": "platinum"}
    assert (await http.post("/v1/completions", json=PROMPT, headers=claimed)).status_code == 200
    assert (await http.get("/v1/models", headers=claimed)).status_code == 200
    assert [add.client_class for add in engine.adds] == ["gold"]


async def test_a_rate_says_when_to_come_again_and_a_model_is_forbidden(http: httpx2.AsyncClient):
    assert (await http.post("/v1/completions", json=PROMPT, headers=bearer("bob"))).status_code == 200
    response = await http.post("/v1/completions", json=PROMPT, headers=bearer("bob"))
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(response.headers["retry-after"]) > 0
    assert (await http.post("/v1/completions", json=PROMPT, headers=bearer("eve"))).status_code == 403


async def test_a_batch_that_can_never_run_is_not_told_to_come_again(http: httpx2.AsyncClient, engine: FakeEngine):
    for path, fields, field in (
        ("completions", {**PROMPT, "prompt": ["a", "b"]}, "prompt"),
        ("embeddings", {"input": ["a", "b"]}, "input"),
    ):
        response = await http.post(f"/v1/{path}", json=fields, headers=bearer("bob"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert "retry-after" not in response.headers
    response = await http.post(
        "/v1/completions", json={**PROMPT, "prompt": ["a"] * 600, "n": 2}, headers=bearer("alice")
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert engine.adds == []


async def test_certificates_are_read_again(engine: FakeEngine, tmp_path: Path):
    cert, key, port = tmp_path / "cert.pem", tmp_path / "key.pem", free_port()

    def issue(authority: trustme.CA) -> None:
        issued = authority.issue_cert("127.0.0.1", "localhost")
        key.write_bytes(issued.private_key_pem.bytes())
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    async def health(authority: trustme.CA) -> int:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        async with httpx2.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=30) as client:
            return int((await client.get("/health")).status_code)

    first, second = trustme.CA(), trustme.CA()
    issue(first)
    settings = {"tls_cert_file": cert, "tls_key_file": key, "http_port": port}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **settings) as running:
        await running.wait_until(lambda: running.process._is_serving)
        assert await health(first) in (200, 503)
        with pytest.raises(httpx2.HTTPError):
            await health(second)
        issue(second)
        assert await health(second) in (200, 503)
        # Half of a pair: what is in force stays.
        cert.write_text("not yet")
        assert await health(second) in (200, 503)


async def test_clients_need_a_certificate_where_a_ca_is_given(engine: FakeEngine, tmp_path: Path):
    authority, stranger, port = trustme.CA(), trustme.CA(), free_port()
    paths = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(str(paths["key"]))
    paths["cert"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(str(paths["ca"]))

    async def health(certificate: trustme.LeafCert | None) -> int:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        if certificate:
            certificate.configure_cert(context)
        async with httpx2.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=30) as client:
            return int((await client.get("/health")).status_code)

    tls = {"tls_cert_file": paths["cert"], "tls_key_file": paths["key"], "tls_client_ca_file": paths["ca"]}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", http_port=port, **tls) as running:
        await running.wait_until(lambda: running.process._is_serving)
        assert await health(authority.issue_cert("client.example")) == 200
        for other in (None, stranger.issue_cert("client.example")):
            with pytest.raises(httpx2.HTTPError):
                await health(other)
