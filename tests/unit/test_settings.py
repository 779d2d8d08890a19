"""Settings of both services: flag = variable = one name; mistakes are named and end the process with 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from pydantic import ValidationError

from engine_core.config import EngineSettings
from frontend.config import FrontendSettings
from stepwire.settings import (
    Settings,
    build_revision,
    environment_without_settings,
    set_default_variable,
    unknown_variables,
)

TLS = ["--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem"]


@pytest.fixture
def pem_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a certificate and two keys, one of which is another's."""
    monkeypatch.chdir(tmp_path)
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path("cert.pem")
    certificate.private_key_pem.write_to_path("key.pem")
    authority.issue_cert("localhost").private_key_pem.write_to_path("other.pem")
    return tmp_path


def load(*args: str) -> FrontendSettings:
    return FrontendSettings.from_command_line(list(args))


def test_flags_win_over_variables_and_variables_over_defaults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STEPWIRE_PORT", "1234")
    monkeypatch.setenv("STEPWIRE_DRAIN_TIMEOUT_S", "7.5")
    settings = load("--port", "4321")
    assert (settings.port, settings.drain_timeout_s, settings.metrics_port) == (4321, 7.5, 9100)


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        load().port = 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--port", "x"], "--port"),
        (["--port", "-1"], "--port"),
        (["--nonsense", "1"], "nonsense"),
        (["--otlp-endpoint", "collector:4317"], "--otlp-endpoint"),
        (["--otlp-protocol", "http/json"], "--otlp-protocol"),
        (["--log-level", "LOUD"], "--log-level"),
        (["--engine-endpoints", " , "], "at least one"),
        (["--engine-endpoints", "a:1,a:1"], "listed twice"),
        (["--engine-endpoints", "host"], "'host' is neither"),
        (["--engine-endpoints", "host:99999"], "'host:99999' is neither"),
        (["--engine-endpoints", "dns:///name"], "'dns:///name' is neither"),
        (["--engine-endpoints", "dns:///name:0"], "'dns:///name:0' is neither"),
        (["--tokenizer", "/no/such/place"], "/no/such/place is not a directory"),
    ],
)
def test_mistakes_are_named(args: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        load(*args)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "args", "said"),
    [
        (FrontendSettings, ["--host", "0.0.0.0"], "--host 0.0.0.0 would carry prompts and tokens in clear"),
        (FrontendSettings, ["--host", "example.org"], "--tls-cert-file"),
        (FrontendSettings, ["--admin-host", "::"], "--admin-host :: would"),
        (FrontendSettings, ["--host", "0.0.0.0", *TLS, "--admin-host", "0.0.0.0"], "let anybody pause the engines"),
        (FrontendSettings, ["--tls-cert-file", "cert.pem"], "--tls-cert-file and --tls-key-file go together"),
        (FrontendSettings, ["--tls-client-ca-file", "cert.pem"], "--tls-client-ca-file needs --tls-cert-file"),
        (FrontendSettings, ["--tls-cert-file", "cert.pem", "--tls-key-file", "other.pem"], "belong together"),
        (FrontendSettings, ["--tls-cert-file", "none.pem", "--tls-key-file", "key.pem"], "none.pem is not a file"),
        (FrontendSettings, ["--engine-tls-server-name", "x"], "--engine-tls-server-name has no meaning"),
        (
            FrontendSettings,
            ["--engine-tls-cert-file", "cert.pem", "--engine-tls-key-file", "key.pem"],
            "needs --engine-tls-ca-file",
        ),
        (FrontendSettings, ["--token-file", "none.toml"], "--token-file: none.toml cannot be read"),
        (EngineSettings, ["--host", "0.0.0.0"], "let anybody use the engine"),
        (EngineSettings, ["--host", "0.0.0.0", *TLS], "--tls-client-ca-file"),
    ],
)
def test_unsafe_combinations_are_refused(settings: type[Settings], args: list[str], said: str, pem_dir: Path, capsys):
    with pytest.raises(SystemExit) as caught:
        settings.from_command_line(args)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_safe_combinations_are_not_refused(pem_dir: Path):
    mutual = [*TLS, "--tls-client-ca-file", "cert.pem"]
    for args in (["--host", "::1"], ["--host", "0.0.0.0", *TLS], ["--host", "0.0.0.0", "--insecure"]):
        assert FrontendSettings.from_command_line(args).host
    FrontendSettings.from_command_line(["--admin-host", "0.0.0.0", *mutual])
    for args in (["--host", "0.0.0.0", *mutual], ["--host", "0.0.0.0", "--insecure"], TLS):
        assert EngineSettings.from_command_line(args).host


def test_client_classes_are_read():
    flags = ["--client-class-weights", "gold=4, *=2", "--client-class-best-priorities", "free=0,*=-5"]
    settings = EngineSettings.from_command_line(["--scheduling-policy", "priority", *flags])
    classes = settings.client_classes
    assert [classes.weight(name) for name in ("gold", "free", "")] == [4, 2, 2]
    assert [classes.capped_priority(name, -9) for name in ("free", "gold")] == [0, -5]
    assert [classes.capped_priority(name, 7) for name in ("free", "gold")] == [7, 7]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--scheduling-policy", "lifo"], "--scheduling-policy"),
        (["--scheduling-policy", "fcfs", "--client-class-weights", "a=2"], "no meaning with --scheduling-policy fcfs"),
        (["--client-class-best-priorities", "a=2"], "needs --scheduling-policy priority"),
        (["--scheduling-policy", "priority", "--client-class-weights", "a=0"], "'a=0' is not between 1 and 1000"),
        (["--scheduling-policy", "priority", "--client-class-weights", "a"], "'a' is not like NAME=NUMBER"),
        (["--scheduling-policy", "priority", "--client-class-weights", "a=1,a=2"], "there already"),
        (["--scheduling-policy", "priority", "--client-class-weights", "=2"], "names no class"),
        (["--scheduling-policy", "priority", "--client-class-best-priorities", "a=9999999999"], "is not between"),
        (["--max-num-partial-prefills", "1", "--no-enable-chunked-prefill"], "--max-num-partial-prefills"),
    ],
)
def test_policies_that_make_no_sense_are_refused(args: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        EngineSettings.from_command_line(args)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("STEPWIRE_PROT", "1")
    with pytest.raises(SystemExit) as caught:
        load()
    assert caught.value.code == 2
    assert "STEPWIRE_PROT" in capsys.readouterr().err


def test_unknown_variables_are_those_without_a_setting():
    environ = {"STEPWIRE_PORT": "1", "STEPWIRE_TYPO": "1", "OTHER": "1", "STEPWIRE_REQUIRE_ALL": "1"}
    assert unknown_variables(FrontendSettings, environ) == ["STEPWIRE_TYPO"]


@pytest.mark.parametrize("cls", [FrontendSettings, EngineSettings])
def test_the_commit_of_an_image_is_no_setting_and_children_are_told(cls: type[Settings], monkeypatch):
    monkeypatch.delenv("STEPWIRE_BUILD_REVISION", raising=False)
    assert build_revision() == "unknown"
    monkeypatch.setenv("STEPWIRE_BUILD_REVISION", "abc123")
    monkeypatch.setenv("STEPWIRE_PORT", "1")
    assert build_revision() == "abc123"
    child = environment_without_settings()
    assert unknown_variables(cls, child) == []
    assert (child["STEPWIRE_BUILD_REVISION"], child.get("STEPWIRE_PORT")) == ("abc123", None)


@pytest.mark.parametrize(("cls", "module"), [(FrontendSettings, "frontend"), (EngineSettings, "engine_core")])
def test_a_check_of_the_settings_says_one_line_and_ends_before_anything_starts(
    cls: type[Settings], module: str, capsys: pytest.CaptureFixture[str]
):
    for args, code, said in (
        (["--check-config"], 0, f"the settings of python -m {module} are valid\n"),
        (["--check-config", "--port", "-1"], 2, ""),
    ):
        with pytest.raises(SystemExit) as caught:
            cls.from_command_line(args)
        shown = capsys.readouterr()
        assert (caught.value.code, shown.out) == (code, said)
        assert shown.err.count("\n") == (code == 2)


def test_a_check_by_variable_is_one_of_the_process():
    environment = {**environment_without_settings(), "STEPWIRE_CHECK_CONFIG": "true", "STEPWIRE_DRAIN_TIMEOUT": "5"}
    command = [sys.executable, "-m", "frontend"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown environment variable STEPWIRE_DRAIN_TIMEOUT:")
    del environment["STEPWIRE_DRAIN_TIMEOUT"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "the settings of python -m frontend are valid\n")


@pytest.mark.parametrize("cls", [FrontendSettings, EngineSettings])
def test_every_setting_is_described_and_in_help(cls: type[Settings], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cls.from_command_line(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name, field in cls.model_fields.items():
        assert field.description, name
        assert f"--{name.replace('_', '-')}" in shown


def test_endpoints_are_split():
    settings = load("--engine-endpoints", "a:1, unix:/run/x.sock,[::1]:5,dns:///engines:5")
    assert settings.endpoints == ["a:1", "unix:/run/x.sock", "[::1]:5", "dns:///engines:5"]


def test_a_rank_is_below_the_number_of_ranks(capsys: pytest.CaptureFixture[str]):
    assert EngineSettings.from_command_line(["--data-parallel-rank", "1", "--data-parallel-size", "2"])
    with pytest.raises(SystemExit):
        EngineSettings.from_command_line(["--data-parallel-rank", "2", "--data-parallel-size", "2"])
    assert "--data-parallel-rank (2) must be below --data-parallel-size (2)" in capsys.readouterr().err


def test_cache_directory_is_absolute_by_default():
    assert load().cache_dir.is_absolute()
    assert load("--cache-dir", "here").cache_dir == Path("here")


def test_cache_events_need_a_prefix_cache():
    assert EngineSettings(enable_kv_events=True).enable_kv_events
    with pytest.raises(ValidationError, match="--enable-prefix-caching"):
        EngineSettings(enable_kv_events=True, enable_prefix_caching=False)


def test_a_default_for_a_library_does_not_overrule_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATORS_CHOICE", "theirs")
    # Noted before it is deleted, so that it is gone after the test.
    monkeypatch.setenv("NOBODYS_CHOICE", "")
    monkeypatch.delenv("NOBODYS_CHOICE")
    assert not set_default_variable("OPERATORS_CHOICE", "ours")
    assert set_default_variable("NOBODYS_CHOICE", "ours")
    assert (os.environ["OPERATORS_CHOICE"], os.environ["NOBODYS_CHOICE"]) == ("theirs", "ours")


def test_a_protocol_of_traces_that_is_not_spoken_is_named_with_its_variable_where_traces_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    assert not load().exports_traces
    assert load("--otlp-endpoint", "http://c:4317", "--otlp-protocol", "grpc").trace_protocol == "grpc"
    with pytest.raises(SystemExit):
        load("--otlp-endpoint", "http://c:4317")
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: 'http/json' is not grpc or http/protobuf" in capsys.readouterr().err
