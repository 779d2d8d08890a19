"""Tokens and TLS through real sockets: who is let in, what others are told, and what changes without a restart."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from cryptography import x509
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from fakes.fake_engine import FakeEngine
from running_engine import running_engine
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.v1 import admin_service_pb2, admin_service_pb2_grpc, generation_service_pb2_grpc, model_service_pb2
from stepwire.v1.generation_service_pb2 import AbortRequest

Code = grpc.StatusCode
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
TOKENS = f"""
[tokens.alice]
token = "{ALICE}"
class = "gold"
share = 0.25
[tokens.bob]
token = "{BOB}"
requests_per_minute = 1
models = ["fake-model"]
admin = true
"""


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
async def guarded(engine: FakeEngine, tmp_path: Path):
    (tmp_path / "tokens.toml").write_text(TOKENS)
    settings = {"token_file": tmp_path / "tokens.toml", "max_concurrent_requests": 8}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **settings) as running:
        await running.wait_for_health(SERVING)
        yield running


async def test_without_a_good_token_every_service_is_closed(guarded: RunningFrontend, engine: FakeEngine):
    for metadata in ((), bearer("unknown"), (("authorization", "Basic x"),)):
        for failure in (
            await failure_of(guarded.generation.Generate(request(), metadata=metadata)),
            await failure_of(guarded.generation.GenerateStream(request(), metadata=metadata).read()),
            await failure_of(guarded.generation.Abort(AbortRequest(), metadata=metadata)),
            await failure_of(guarded.models.ListModels(model_service_pb2.ListModelsRequest(), metadata=metadata)),
        ):
            assert (failure.code, failure.reason) == (Code.UNAUTHENTICATED, "UNAUTHENTICATED")
            assert failure.info.metadata["retryable"] == "false"
            assert "unknown" not in failure.message
    assert engine.adds == []
    method = "/stepwire.v1.GenerationService/Generate"
    await guarded.wait_for_metric(3, "rpcs_handled_total", grpc_method=method, grpc_code="UNAUTHENTICATED")
    assert guarded.metric("auth_failures_total", reason="UNAUTHENTICATED") == 3 * 4


async def test_a_token_lets_in_with_its_class_and_takes_no_other(guarded: RunningFrontend, engine: FakeEngine):
    claimed = (*bearer(ALICE), ("x-gateway-inference-fairness-id", "platinum"))
    await guarded.generation.Generate(request(), metadata=claimed)
    assert [add.client_class for add in engine.adds] == ["gold"]


async def test_figures_have_the_class_of_the_token_and_none_that_only_a_caller_knows(
    guarded: RunningFrontend, engine: FakeEngine
):
    engine.may_step.clear()
    claimed = (*bearer(BOB), ("x-gateway-inference-fairness-id", "platinum"))
    streams = [guarded.stream(request(), metadata=metadata) for metadata in (bearer(ALICE), bearer(ALICE), claimed)]
    for stream in streams:
        await stream.next()
    assert guarded.metric("requests_in_flight", client_class="gold") == 2
    assert guarded.metric("requests_in_flight", client_class="other") == 1
    for refused in (bearer(ALICE), claimed):
        await failure_of(guarded.generation.Generate(request(), metadata=refused))
    assert guarded.metric("requests_rejected_total", client_class="gold", reason="RATE_LIMITED") == 1
    assert guarded.metric("requests_rejected_total", client_class="other", reason="RATE_LIMITED") == 1
    engine.may_step.set()
    for stream in streams:
        await stream.rest()
    assert guarded.metric("requests_in_flight", client_class="gold") == 0
    assert guarded.metric("requests_in_flight", client_class="other") == 0


async def test_a_class_that_is_named_while_its_requests_run_does_not_upset_the_gauge(
    guarded: RunningFrontend, engine: FakeEngine, tmp_path: Path
):
    engine.may_step.clear()
    stream = guarded.stream(request(), metadata=(*bearer(BOB), ("x-gateway-inference-fairness-id", "late")))
    await stream.next()
    (tmp_path / "tokens.toml").write_text(TOKENS.replace('"gold"', '"late"'))
    guarded.process.frontend.refresh_tokens()
    engine.may_step.set()
    await stream.rest()
    for client_class in ("late", "gold", "other"):
        assert guarded.metric("requests_in_flight", client_class=client_class) == 0


async def test_a_rate_is_refused_with_quota_and_time(guarded: RunningFrontend):
    await guarded.generation.Generate(request(), metadata=bearer(BOB))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await guarded.generation.Generate(request(), metadata=bearer(BOB))
    failure = await failure_of(guarded.generation.Generate(request(), metadata=bearer(BOB)))
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert 0 < failure.retry_info.retry_delay.ToMilliseconds() <= 60_000
    assert int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
    quota = error_details_pb2.QuotaFailure()
    assert any(detail.Unpack(quota) for detail in rpc_status.from_call(caught.value).details)
    assert [violation.subject for violation in quota.violations] == ["token:bob"]


async def test_a_share_is_all_that_a_token_holds_and_others_go_on(guarded: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    streams = [guarded.stream(request(), metadata=bearer(ALICE)) for _ in range(2)]
    for stream in streams:
        await stream.next()
    failure = await failure_of(guarded.generation.Generate(request(), metadata=bearer(ALICE)))
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    engine.may_step.set()
    await guarded.generation.Generate(request(), metadata=bearer(BOB))
    for stream in streams:
        await stream.rest()


async def test_tokens_change_without_a_restart(guarded: RunningFrontend, tmp_path: Path):
    (tmp_path / "tokens.toml").write_text(TOKENS.replace("fake-model", "other").replace(ALICE, f"{ALICE}-new"))
    guarded.process.frontend.refresh_tokens()
    await guarded.generation.Generate(request(), metadata=bearer(f"{ALICE}-new"))
    gone = await failure_of(guarded.generation.Generate(request(), metadata=bearer(ALICE)))
    denied = await failure_of(guarded.generation.Generate(request(), metadata=bearer(BOB)))
    assert gone.code is Code.UNAUTHENTICATED
    assert (denied.code, denied.reason) == (Code.PERMISSION_DENIED, "PERMISSION_DENIED")


async def test_the_admin_port_takes_admin_tokens_and_logs_their_names(guarded: RunningFrontend, caplog):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{guarded.process.admin_port}") as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        status = admin_service_pb2.GetDrainStatusRequest()
        nobody = await failure_of(stub.GetDrainStatus(status))
        denied = await failure_of(stub.GetDrainStatus(status, metadata=bearer(ALICE)))
        with caplog.at_level(logging.INFO, "frontend.api.admin"):
            await stub.GetDrainStatus(status, metadata=bearer(BOB))
    assert (nobody.code, denied.code) == (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
    [line] = [record.getMessage() for record in caplog.records if "admin call" in record.getMessage()]
    assert line.startswith("admin call GetDrainStatus by ipv4:127.0.0.1:")
    assert "token bob: {}" in line
    assert BOB not in caplog.text


class Authority(trustme.CA):
    """Certificates as files."""

    def write(self, directory: Path, name: str) -> dict[str, Path]:
        certificate = self.issue_cert("localhost", "127.0.0.1")
        paths = {kind: directory / f"{name}-{kind}.pem" for kind in ("cert", "key", "ca")}
        paths["cert"].write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(str(paths["key"]))
        self.cert_pem.write_to_path(str(paths["ca"]))
        return paths


def credentials(ca: Path, client: dict[str, Path] | None = None) -> grpc.ChannelCredentials:
    pair = (client["key"].read_bytes(), client["cert"].read_bytes()) if client else (None, None)
    return grpc.ssl_channel_credentials(ca.read_bytes(), *pair)


async def ask(port: int, trusted: grpc.ChannelCredentials) -> str:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options=options) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        return (await stub.Generate(request(), timeout=30)).completions[0].text


async def test_certificates_are_read_again_and_half_a_pair_changes_nothing(engine: FakeEngine, tmp_path: Path):
    old, new = Authority(), Authority()
    files, others = old.write(tmp_path, "server"), new.write(tmp_path, "new")
    trusts_old, trusts_new = credentials(files["ca"]), credentials(others["ca"])
    tls = {"tls_cert_file": files["cert"], "tls_key_file": files["key"]}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **tls) as running:
        await running.wait_until(lambda: running.process.frontend.is_serving)
        port = running.process.port
        assert await ask(port, trusts_old)
        plain = await failure_of(running.generation.Generate(request()))
        assert plain.code is Code.UNAVAILABLE
        files["cert"].write_bytes(others["cert"].read_bytes())
        assert await ask(port, trusts_old)
        served = x509.load_pem_x509_certificate(others["cert"].read_bytes())
        expiry = running.metric("tls_certificate_expiry_timestamp_seconds")
        assert expiry == served.not_valid_after_utc.timestamp()
        files["key"].write_bytes(others["key"].read_bytes())
        assert await ask(port, trusts_new)
        assert (await failure_of(ask(port, trusts_old))).code is Code.UNAVAILABLE


async def test_clients_need_a_certificate_where_a_ca_is_given(engine: FakeEngine, tmp_path: Path):
    authority = Authority()
    files, client = authority.write(tmp_path, "server"), authority.write(tmp_path, "client")
    tls = {"tls_cert_file": files["cert"], "tls_key_file": files["key"], "tls_client_ca_file": files["ca"]}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **tls) as running:
        await running.wait_until(lambda: running.process.frontend.is_serving)
        assert await ask(running.process.port, credentials(files["ca"], client))
        stranger = Authority().write(tmp_path, "stranger")
        for other in (None, stranger):
            failure = await failure_of(ask(running.process.port, credentials(files["ca"], other)))
            assert failure.code is Code.UNAVAILABLE


@pytest.mark.slow
async def test_frontend_and_engine_know_each_other_by_certificates(tokenizer_dir: Path, tmp_path: Path):
    authority = Authority()
    files, own = authority.write(tmp_path, "engine"), authority.write(tmp_path, "frontend")
    flags = ("--tls-cert-file", str(files["cert"]), "--tls-key-file", str(files["key"]))
    flags += ("--tls-client-ca-file", str(files["ca"]), "--num-blocks", "64", "--max-model-len", "-1")
    tls = {"engine_tls_ca_file": own["ca"], "engine_tls_cert_file": own["cert"], "engine_tls_key_file": own["key"]}
    with running_engine(*flags) as engine:
        health = health_pb2_grpc.HealthStub(engine.channel)
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert caught.value.code() is Code.UNAVAILABLE
        settings = {"cache_dir": tmp_path / "cache", "tokenizer": str(tokenizer_dir), **tls}
        async with running_frontend(f"127.0.0.1:{engine.port}", **settings) as running:
            await running.wait_for_health(SERVING)
            assert (await running.generation.Generate(request())).usage.completion_tokens


SERVER_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def test_services_can_be_discovered_unless_that_is_off(engine: FakeEngine, tmp_path: Path):
    for is_on in (True, False):
        settings = {"cache_dir": tmp_path / "cache", "enable_reflection": is_on}
        async with running_frontend(engine.endpoint, **settings) as running:
            for port in (running.process.port, running.process.admin_port):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    # An empty question, which a server that knows the service answers with an error of its own. Whole
                    # in one write: a refusal must not meet the rest of it on its way.
                    call = channel.unary_stream(SERVER_REFLECTION)(b"")
                    if is_on:
                        assert await call.read()
                    else:
                        failure = await failure_of(call.read())
                        assert (failure.code, failure.reason) == (Code.UNIMPLEMENTED, ""), failure.message
