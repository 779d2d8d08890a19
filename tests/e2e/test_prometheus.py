"""Every panel, every rule and the report, asked of a real Prometheus that scrapes the real services under load."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme
from typer.testing import CliRunner
from yaml import safe_load

from free_ports import free_port
from rule_sides import sides_of
from running_prometheus import HOW, RULES, RunningPrometheus, running_prometheus, wait_until
from running_stack import SERVING, Frontend, Service, Stack, running_stack
from skips import require_program
from stepwire.v1 import admin_service_pb2, admin_service_pb2_grpc, common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest
from stepwire_client.cli import app
from stepwire_client.monitor import report
from stepwire_client.monitor.boards import BOARDS
from stepwire_client.monitor.panel import Panel
from stepwire_client.monitor.prometheus import Span

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
WINDOW_S = 20.0
PANELS = [panel for board in BOARDS for panel in board.panels()]
# 512 tokens of KV: enough for a few requests, which preempt each other.
ENGINE_FLAGS = ("--num-blocks=32", "--max-model-len=-1", "--max-queued-requests=8", "--ping-interval-ms=500")


@dataclass(frozen=True, slots=True)
class Observed:
    """A span of load, with everything in it that panels can show."""

    server: RunningPrometheus
    span: Span
    metrics: list[str]


@pytest.fixture(scope="module")
def observed(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    program = require_program("prometheus", how=HOW)
    directory = tmp_path_factory.mktemp("observed")
    with (
        running_stack(embedded_model_dir, directory) as stack,
        running_prometheus(program, directory, RULES.read_text(encoding="utf-8")) as server,
    ):
        yield observe(stack, server, directory)


def observe(stack: Stack, server: RunningPrometheus, directory: Path) -> Observed:
    """Start the services, let happen what panels show, and wait until it has been scraped."""
    start, port = time.time(), free_port()
    stays = stack.engine("--engine-id", "stays", *ENGINE_FLAGS)
    dies = stack.engine("--engine-id", "dies", *ENGINE_FLAGS, port=port)
    frontend = stack.frontend(stays, dies, http_port=free_port())
    secure = stack.frontend(stays, flags=tls_flags(directory))
    server.scrape([frontend.metrics_port, secure.metrics_port], [stays.metrics_port, dies.metrics_port])
    frontend.wait_for_health(SERVING)
    wait_until(lambda: frontend.metric("stepwire_frontend_engine_up") == 2, "both engines are attached", TIMEOUT_S)
    load(frontend)
    dies.kill()
    wait_until(lambda: frontend.metric("stepwire_frontend_engine_up") == 1, "the death is known")
    back = stack.engine("--engine-id", "dies", *ENGINE_FLAGS, port=port)
    server.scrape([frontend.metrics_port, secure.metrics_port], [stays.metrics_port, back.metrics_port])
    wait_until(lambda: frontend.metric("stepwire_frontend_engine_up") == 2, "the engine is back", TIMEOUT_S)
    for number in range(4):
        stream(frontend, request(f"Once more, {number}: ", 4))
    wait_until(lambda: all_is_scraped(server, frontend, back), "the last of it has been scraped")
    endpoints = [f"127.0.0.1:{service.metrics_port}" for service in (frontend, stays, back)]
    return Observed(server, Span(start, time.time(), 1.0), endpoints)


def all_is_scraped(server: RunningPrometheus, frontend: Frontend, engine: Service) -> bool:
    finished = server.value("sum(stepwire_frontend_requests_finished_total)", time.time())
    restarts = server.value('sum(stepwire_frontend_engine_reconnects_total{result="new_boot"})', time.time())
    return finished == frontend.metric("stepwire_frontend_requests_finished_total") and restarts == 1


def tls_flags(directory: Path) -> tuple[str, ...]:
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    return ("--tls-cert-file", str(directory / "cert.pem"), "--tls-key-file", str(directory / "key.pem"))


def request(text: str, max_tokens: int = 60, **more: object) -> GenerateRequest:
    stop = common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(text=text, stop=stop, **more)  # type: ignore[arg-type]


def load(frontend: Frontend) -> None:
    """Answers, of which some preempt others; and everything that ends differently."""
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(stream, frontend, request(f"Question {number}: ")) for number in range(16)]
        others = [pool.submit(other, frontend) for other in (constrained, cancelled, invalid, over_http, operation)]
        for future in (*asked, *others):
            future.result(TIMEOUT_S)
    flood(frontend)


def stream(frontend: Frontend, generate: GenerateRequest) -> None:
    assert list(frontend.generation.GenerateStream(generate, timeout=TIMEOUT_S))


def constrained(frontend: Frontend) -> None:
    stream(frontend, request("Yes or no? ", structured_output=common_pb2.StructuredOutput(regex="yes|no")))


def cancelled(frontend: Frontend) -> None:
    call = frontend.generation.GenerateStream(request("Once upon a time", 400), timeout=TIMEOUT_S)
    next(call)
    call.cancel()


def invalid(frontend: Frontend) -> None:
    with pytest.raises(grpc.RpcError):
        stream(frontend, request("", 0))


def flood(frontend: Frontend) -> None:
    """More than both engines queue: some are refused. No answer ends before that, however slowly they are asked."""
    calls = [frontend.generation.GenerateStream(request("Hello ", 400), timeout=TIMEOUT_S) for _ in range(120)]
    codes = [call.code() for call in calls if not is_accepted(call)]
    for call in calls:
        call.cancel()
    assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}


def is_accepted(call: grpc.Call) -> bool:
    try:
        return bool(next(call))  # type: ignore[call-overload]
    except grpc.RpcError:
        return False


def over_http(frontend: Frontend) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 4, "model": ""}).encode()
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{frontend_http_port(frontend)}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=TIMEOUT_S) as response:
        assert response.status == 200


def frontend_http_port(frontend: Frontend) -> int:
    return int(re.search(r"--http-port', '(\d+)'", str(frontend.process.args))[1])  # type: ignore[index]


def operation(frontend: Frontend) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{frontend.admin_port}") as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        stub.ResetPrefixCache(admin_service_pb2.ResetPrefixCacheRequest(), timeout=TIMEOUT_S)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_shows_finite_data(observed: Observed, panel: Panel) -> None:
    for query in panel.queries:
        expr = report.substitute(query.expr, report.Choice(), WINDOW_S)
        found = observed.server.range(expr, observed.span)
        assert any(series.points for series in found), expr
        assert all(report.name_of(query.legend, series) for series in found), query.legend


def questions() -> list[tuple[str, str]]:
    """(name, expression) of every recording rule as it is, and of both sides of every comparison of an alert."""
    rules = [rule for group in safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
    recorded = [(rule["record"], rule["expr"]) for rule in rules if "record" in rule]
    return recorded + [(rule["alert"], side) for rule in rules if "alert" in rule for side in sides_of(rule["expr"])]


@pytest.mark.parametrize(("name", "expr"), questions(), ids=lambda value: value if " " not in value else "")
def test_what_a_rule_looks_at_is_finite_data(observed: Observed, name: str, expr: str) -> None:
    found = observed.server.range(expr, observed.span)
    assert any(series.points for series in found), (name, expr)


def test_the_page_has_every_panel_with_data(observed: Observed, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    length = f"{round(observed.span.end_s - observed.span.start_s)}s"
    flags = ["--prometheus", observed.server.url, "--last", length, "--end", str(observed.span.end_s)]
    done = CliRunner().invoke(app, ["report", *flags, "--output", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == len(PANELS)
    assert "No data" not in text
    assert "StepwireEngineDied" in text
    assert not re.search(r"(src|href)=|url\(|@import", text), "it needs something else"


def test_top_shows_the_services(observed: Observed) -> None:
    done = CliRunner().invoke(app, ["top", *observed.metrics, "--once", "--interval", "0.5"])
    assert done.exit_code == 0, done.output
    assert "stays" in done.output
    assert done.output.count("running") == 2
