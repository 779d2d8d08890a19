"""The Python client and the `stepwire` command at a server that wants a token and a certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from test_security import BOB, TOKENS, Authority
from typer.testing import CliRunner, Result

from fakes.fake_engine import FakeEngine
from running_frontend import RunningFrontend, request, running_frontend
from stepwire.v1 import admin_service_pb2
from stepwire_client import CallError, Client, Credentials
from stepwire_client.admin_client import AdminClient
from stepwire_client.cli import app

ADMIN = TOKENS.replace("requests_per_minute = 1\n", "")


class Guarded:
    def __init__(self, running: RunningFrontend, files: dict[str, Path], own: dict[str, Path]) -> None:
        self.target = f"localhost:{running.process.port}"
        self.admin_target = f"localhost:{running.process.admin_port}"
        self.tls = {"tls_ca_file": files["ca"], "tls_cert_file": own["cert"], "tls_key_file": own["key"]}

    @property
    def flags(self) -> list[str]:
        return [part for name, path in self.tls.items() for part in (f"--{name.replace('_', '-')}", str(path))]


@pytest.fixture
async def guarded(engine: FakeEngine, tmp_path: Path):
    (tmp_path / "tokens.toml").write_text(ADMIN)
    authority = Authority()
    files, own = authority.write(tmp_path, "server"), authority.write(tmp_path, "client")
    tls = {"tls_cert_file": files["cert"], "tls_key_file": files["key"], "tls_client_ca_file": files["ca"]}
    settings = {"token_file": tmp_path / "tokens.toml", "cache_dir": tmp_path / "cache", **tls}
    async with running_frontend(engine.endpoint, **settings) as running:
        await running.wait_until(lambda: running.process.frontend.is_serving)
        yield Guarded(running, files, own)


async def command(*arguments: str, **environment: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=environment)


async def test_every_kind_of_call_carries_the_credentials(guarded: Guarded):
    def use() -> None:
        credentials = Credentials(BOB, **guarded.tls)
        with Client(guarded.target, credentials=credentials) as client:
            assert client.models()
            assert client.generate(request()).completions[0].text
            assert list(client.generate_stream(request()))[-1].HasField("finished")
        with AdminClient(guarded.admin_target, credentials=credentials) as admin:
            admin.call(admin.stub.GetDrainStatus, admin_service_pb2.GetDrainStatusRequest(), timeout_s=30)

    await asyncio.to_thread(use)


async def test_without_a_token_or_a_certificate_nobody_comes_in(guarded: Guarded):
    def code(credentials: Credentials) -> grpc.StatusCode:
        with Client(guarded.target, credentials=credentials) as client, pytest.raises(CallError) as caught:
            client.generate(request(), timeout_s=30)
        return caught.value.code

    assert await asyncio.to_thread(code, Credentials(**guarded.tls)) is grpc.StatusCode.UNAUTHENTICATED
    without = Credentials(BOB, tls_ca_file=guarded.tls["tls_ca_file"])
    assert await asyncio.to_thread(code, without) is grpc.StatusCode.UNAVAILABLE


async def test_the_command_takes_a_token_by_flag_variable_and_file(guarded: Guarded, tmp_path: Path):
    (tmp_path / "token").write_text(f"{BOB}\n")
    models = ("models", "--target", guarded.target)
    assert (await command(*guarded.flags, "--token", BOB, *models)).exit_code == 0
    assert (await command(*guarded.flags, *models, STEPWIRE_TOKEN=BOB)).exit_code == 0
    from_file = ("--token-file", str(tmp_path / "token"))
    assert (await command(*guarded.flags, *from_file, *models, STEPWIRE_TOKEN="another")).exit_code == 0
    assert (await command(*guarded.flags, *models)).exit_code == 1
    drain = ("admin", "drain-status", "--target", guarded.admin_target)
    assert (await command(*guarded.flags, *from_file, *drain)).exit_code == 0


async def test_bench_carries_the_credentials(guarded: Guarded):
    bench = ("bench", "--target", guarded.target, "--concurrency", "1", "--input-len", "4", "--output-len", "2")
    result = await command(*guarded.flags, *bench, "--json", STEPWIRE_TOKEN=BOB)
    assert result.exit_code == 0, result.output
    assert (await command(*guarded.flags, *bench)).exit_code == 1


@pytest.mark.parametrize("token", ["canary with spaces", "canary\nline", "canäry"])
def test_a_token_that_can_not_be_sent_is_refused_and_not_shown(token: str, tmp_path: Path):
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        Credentials(token)
    (tmp_path / "token").write_text(token)
    for arguments in (["--token", token, "models"], ["--token-file", str(tmp_path / "token"), "models"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert token[:3] not in result.output + str(caught.value)


def test_a_token_is_in_no_repr():
    assert "canary" not in repr(Credentials("canary"))


def test_half_a_pair_and_wrong_files_are_refused(tmp_path: Path):
    (tmp_path / "no.pem").write_text("x")
    with pytest.raises(ValueError, match="come together"):
        Credentials(tls_cert_file=tmp_path / "no.pem")
    with pytest.raises(ValueError, match=r"no\.pem"):
        Credentials(tls_ca_file=tmp_path / "no.pem")
