"""The launcher: its checks, its children, and whole launches with stand-ins for both services."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from google.protobuf import json_format

from fakes import launched_services
from free_ports import free_port
from launcher import children, options, preflight, sample, services
from launcher.errors import LaunchError
from otlp_receiver import receiving
from stepwire.v1 import generation_service_pb2


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def test_a_port_in_use_is_named_with_the_flag_that_moves_it(taken_port):
    with pytest.raises(LaunchError, match=f"port {taken_port} .* is in use: .* --frontend-port"):
        preflight.check_ports([("frontend-port", taken_port)])


def test_free_ports_pass():
    preflight.check_ports([(name, free_port()) for name in "abc"])


def test_too_little_memory_says_how_much():
    with pytest.raises(LaunchError, match=r"too little memory: 1048576\.0 GiB are needed, \d+\.\d GiB are available"):
        preflight.check_memory(2**50)
    preflight.check_memory(1)


def test_unknown_flags_go_to_the_engine_and_those_after_dashes_to_the_frontend():
    parsed = options.parse(["--demo", "--model", "x", "--max-num-seqs", "4", "--", "--log-level", "DEBUG"])
    assert parsed.is_demo
    assert services.engine_command(parsed, 0)[2:7] == ["engine_core", "--model", "x", "--max-num-seqs", "4"]
    frontend = services.frontend_command(parsed)
    assert frontend[2:5] == ["frontend", "--log-level", "DEBUG"]
    assert frontend[frontend.index("--engine-endpoints") + 1] == "127.0.0.1:50061"
    assert frontend[frontend.index("--admin-port") + 1] == "50052"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "5"], "--frontend-port"),
        (["--", "--port=5"], "--frontend-port"),
        (["--metrics-port", "5"], "--engine-metrics-port"),
        (["--model", "x", "--host", "0.0.0.0"], "127.0.0.1"),
        (["--", "--engine-endpoints", "a:1"], "--engine-port"),
        (["--engine-endpoints=a:1"], "--engine-port"),
        (["--owner", "none"], "the launcher"),
    ],
)
def test_flags_that_the_launcher_sets_itself_are_refused_by_name(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    flag = next(text for text in arguments if text.startswith("--") and text not in ("--", "--model"))
    assert error.startswith(f"error: {flag.partition('=')[0]} is set by the launcher")
    assert said in error
    assert error.count("\n") == 1


def test_stopping_waits_longer_than_the_longest_drain():
    assert options.parse([]).stop_timeout_s > 30
    assert options.parse(["--", "--drain-timeout-s", "120"]).stop_timeout_s > 120
    assert options.parse(["--drain-timeout-s=200", "--", "--drain-timeout-s", "0"]).stop_timeout_s > 200
    assert options.parse(["--", "--pre-stop-delay-s", "90"]).stop_timeout_s > 90 + 30


def test_documented_ports_are_the_defaults():
    assert sorted(port for _, port in options.parse([]).ports()) == [8000, 9100, 9101, 50051, 50052, 50061]


def test_a_child_that_ends_by_itself_shows_the_end_of_its_log(tmp_path):
    script = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit('the reason')"
    child = children.start("engine core", python("-c", script), tmp_path)
    child.process.wait(60)
    assert child.stop(timeout_s=60) == f"engine core did not stop cleanly: code 1, see {child.log_path}"
    with pytest.raises(LaunchError) as caught:
        child.check_alive()
    assert "engine core has ended with code 1" in str(caught.value)
    assert "the reason" in str(caught.value)
    assert "\n50\n" not in str(caught.value)
    assert child.log_path == tmp_path / "engine_core.log"


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    script = "import signal,sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    child = children.start("deaf", python("-c", script), tmp_path)
    while child.log_path.read_text() != "up\n":
        child.check_alive()
    assert child.stop(timeout_s=0.1) == "deaf did not stop within 0.1 s and was killed"
    assert child.process.returncode == -signal.SIGKILL


class Launch:
    """A launcher process whose services are stand-ins."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.events_path = launched_services.write(directory)
        self.ports = [free_port() for _ in range(6)]
        flags = ("--engine-port", "--frontend-port", "--engine-metrics-port", "--frontend-metrics-port")
        flags += ("--frontend-admin-port", "--frontend-http-port")
        placed = [text for flag, port in zip(flags, self.ports, strict=True) for text in (flag, str(port))]
        environment = {**os.environ, "PYTHONPATH": str(directory)}
        self.process = subprocess.Popen(
            python("-m", "launcher", "--log-dir", str(directory / "logs"), *placed, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def output(self) -> tuple[str, str]:
        return self.process.communicate(timeout=120)

    def read_until(self, text: str) -> str:
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        pytest.fail(f"no {text!r} in: {seen}")

    def events(self) -> list[str]:
        return self.events_path.read_text().splitlines()


def starts(events: Sequence[str]) -> list[str]:
    return [event for event in events if " started " in event]


@pytest.mark.slow
def test_demo_shows_an_answer_and_stops_frontend_then_engine(tmp_path):
    launch = Launch(tmp_path, "--demo", "--prompt", "one two", "--max-num-seqs", "4")
    output, errors = launch.output()
    assert launch.process.returncode == 0, errors
    assert "one twoONE TWO" in output
    assert "Send the next request" not in output
    assert "engine_core started --max-num-seqs 4" in launch.events()[0] + launch.events()[1]
    assert launch.events()[2:] == ["frontend ended by SIGTERM", "engine_core ended by SIGTERM"]
    assert len(starts(launch.events())) == 2


@pytest.mark.slow
def test_both_services_start_in_the_trace_of_the_launcher(tmp_path, monkeypatch: pytest.MonkeyPatch):
    with receiving() as (receiver, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        launch = Launch(tmp_path, "--demo")
        _, errors = launch.output()
        assert launch.process.returncode == 0, errors
        startup = receiver.find(lambda span: span.service == "stepwire-launcher")
    assert (startup.name, startup.is_error) == ("startup", False)
    traced = [event.partition(" in trace ")[::2] for event in launch.events() if " in trace " in event]
    assert sorted(name for name, _ in traced) == ["engine_core", "frontend"]
    assert {parent.split("-")[1] for _, parent in traced} == {startup.trace_id}
    assert {parent.split("-")[2] for _, parent in traced} == {startup.span_id}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_run_stays_up_until_a_signal_and_exits_0(tmp_path, stop):
    launch = Launch(tmp_path)
    seen = launch.read_until("grpcurl")
    (cli_line,) = [line.strip() for line in seen.splitlines() if " generate " in line]
    answer = subprocess.run(shlex.split(cli_line), capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout == "ONCE UPON A TIME \n"
    launch.process.send_signal(stop)
    _, errors = launch.output()
    assert launch.process.returncode == 0, errors
    assert launch.events()[2:] == ["frontend ended by SIGTERM", "engine_core ended by SIGTERM"]


@pytest.mark.regression(1)
@pytest.mark.slow
def test_killing_the_launcher_leaves_no_service_behind(tmp_path):
    launch = Launch(tmp_path)
    launch.read_until("grpcurl")
    launch.process.kill()
    launch.output()
    while len(launch.events()) < 4:
        pass
    assert set(launch.events()[2:]) == {"frontend ended by orphaned", "engine_core ended by orphaned"}


@pytest.mark.slow
def test_of_two_engines_one_that_dies_is_started_again_at_its_place(tmp_path, monkeypatch):
    events = launched_services.write(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(services, "MIN_LIFE_S", 0.0)
    launch = options.parse(["--engines", "2", "--log-dir", str(tmp_path / "logs"), "--frontend-port", str(free_port())])
    started: list[children.Child] = []
    told: list[str] = []

    def wait_for_starts(count: int) -> None:
        while len(starts(events.read_text().splitlines())) < count:
            started[0].check_alive()

    try:
        services.start_all(launch, started, {})
        frontend = " ".join(started[2].process.args)
        assert "--engine-endpoints 127.0.0.1:50061,127.0.0.1:50062" in frontend
        place, command = 1, started[1].process.args
        wait_for_starts(3)
        started[place].kill()
        heir = services.revived_engine(launch, started, place, told.append)
        assert told == ["engine core 1 has ended with code -9; starting it again"]
        started[place] = heir
        assert heir.process.args == command
        wait_for_starts(4)
        started[2].kill()
        assert services.revived_engine(launch, started, 2, told.append) is None, "there is one frontend"
    finally:
        for child in started:
            child.kill()


def test_an_engine_that_ends_at_once_is_an_error_also_beside_another(tmp_path):
    launch = options.parse(["--engines", "2", "--log-dir", str(tmp_path)])
    ended = children.start("engine core 1", python("-c", "import sys; sys.exit('no such weights')"), tmp_path)
    ended.process.wait(60)
    with pytest.raises(LaunchError, match="no such weights"):
        services.watch([ended], lambda place: services.revived_engine(launch, [ended], place, print))
    ended.close()


def test_every_engine_has_ports_of_its_own():
    launch = options.parse(["--engines", "3"])
    assert launch.engine_ports == [50061, 50062, 50063]
    assert launch.engine_metrics_ports == [9101, 9111, 9121]
    with pytest.raises(SystemExit):
        options.parse(["--engines", "0"])


@pytest.mark.slow
def test_a_service_that_does_not_stop_cleanly_is_reported(tmp_path):
    launch = Launch(tmp_path, "--demo", "--", "--stop-badly")
    _, errors = launch.output()
    assert launch.process.returncode == 1
    assert "error: frontend did not stop cleanly: code 3" in errors
    assert launch.events()[-1] == "engine_core ended by SIGTERM"


@pytest.mark.slow
def test_a_service_that_dies_early_is_shown_and_the_other_stopped(tmp_path):
    launch = Launch(tmp_path, "--die")
    _, errors = launch.output()
    assert launch.process.returncode == 1
    assert "engine core has ended with code 1" in errors
    assert "boom: no such weights" in errors
    assert "Traceback" not in errors
    assert preflight.is_free(launch.ports[1])


def test_a_missing_model_ends_before_anything_starts(tmp_path):
    launch = Launch(tmp_path, "--model", "missing")
    _, errors = launch.output()
    assert launch.process.returncode == 1
    assert errors == "error: --model missing: no such directory\n"
    assert launch.events() == []


def test_a_mistyped_flag_is_one_sentence(tmp_path):
    # The real command, which alone knows the engine's flags.
    code = "from launcher import options, services; services.prepare_model(options.parse(['--modle', 'x']))"
    result = subprocess.run(python("-c", code), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: unrecognized arguments: --modle x; see --help\n"


def test_a_port_in_use_ends_before_anything_starts(tmp_path, taken_port):
    launch = Launch(tmp_path, "--engine-port", str(taken_port))
    _, errors = launch.output()
    assert launch.process.returncode == 1
    assert errors == (
        f"error: port {taken_port} of 127.0.0.1 is in use: stop what listens there, or choose another one with "
        "--engine-port\n"
    )
    assert launch.events() == []


def test_the_printed_grpcurl_line_holds_a_valid_request():
    words = shlex.split(sample.grpcurl_line("127.0.0.1:50051"))
    request = json_format.Parse(words[words.index("-d") + 1], generation_service_pb2.GenerateRequest())
    assert request.text
    assert words[-2] == "127.0.0.1:50051"
    service, method = words[-1].split("/")
    descriptor = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    assert descriptor.full_name == service
    assert method in descriptor.methods_by_name
