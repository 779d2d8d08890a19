"""`stepwire top`: figures from two looks at metrics endpoints, the tables, and the command itself."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from rich.console import Console
from typer.testing import CliRunner

from stepwire.metrics import serve_http
from stepwire_client.cli import app
from stepwire_client.monitor import samples, top_tables
from stepwire_client.monitor.samples import Change, Look


def look(at_s: float, text: str) -> Look:
    return Look(at_s, samples.parse(text))


def histogram(*counts: int) -> str:
    bounds = ("0.1", "0.5", "1.0", "+Inf")
    return "# TYPE h histogram\n" + "".join(
        f'h_bucket{{le="{bound}"}} {count}\n' for bound, count in zip(bounds, counts, strict=True)
    )


def test_a_rate_is_growth_over_time_and_none_at_the_first_look():
    before, now = look(10.0, 'c_total{a="x"} 5\nc_total{a="y"} 7\n'), look(12.0, 'c_total{a="x"} 9\nc_total{a="y"} 7\n')
    assert Change(before, now).rate("c_total") == 2.0
    assert Change(before, now).rate("c_total", a="y") == 0.0
    assert Change(None, now).rate("c_total") is None


def test_a_process_that_was_started_again_counts_from_zero():
    assert Change(look(0.0, "c_total 100\n"), look(2.0, "c_total 6\n")).rate("c_total") == 3.0


def test_a_quantile_is_of_what_was_observed_in_between():
    change = Change(look(0.0, histogram(100, 100, 100, 100)), look(1.0, histogram(100, 110, 110, 110)))
    assert change.quantile(0.5, "h") == pytest.approx(0.3)
    assert change.quantile(1.0, "h") == pytest.approx(0.5)


def test_a_quantile_is_linear_within_its_bucket():
    change = Change(look(0.0, histogram(0, 0, 0, 0)), look(1.0, histogram(5, 10, 10, 10)))
    assert change.quantile(0.75, "h") == pytest.approx(0.3)


def test_a_quantile_beyond_the_last_bound_is_that_bound():
    assert Change(look(0.0, histogram(0, 0, 0, 0)), look(1.0, histogram(0, 0, 0, 4))).quantile(0.99, "h") == 1.0


def test_without_observations_there_is_no_quantile_and_without_a_whole_no_ratio():
    still = Change(look(0.0, histogram(1, 1, 1, 1)), look(1.0, histogram(1, 1, 1, 1)))
    assert still.quantile(0.5, "h") is None
    assert Change(look(0.0, "a 1\nb 1\n"), look(1.0, "a 1\nb 1\n")).ratio("a", "b") is None


def test_bars_are_relative_to_the_largest():
    assert top_tables.spark([0.0, 5.0, 10.0]) == "▁▅█"
    assert top_tables.spark([0.0, 0.0]) == "▁▁"


ENGINE = 'model_name="m",engine_id="e1"'


def engine(tokens: int) -> str:
    return f"""
stepwire_engine_core_requests_running{{{ENGINE}}} 3
stepwire_engine_core_requests_waiting{{{ENGINE}}} 2
stepwire_engine_core_oldest_waiting_seconds{{{ENGINE}}} 0.25
stepwire_engine_core_kv_cache_usage_ratio{{{ENGINE}}} 0.97
stepwire_engine_core_generation_tokens_total{{{ENGINE}}} {tokens}
stepwire_engine_core_state{{{ENGINE},state="starting"}} 0
stepwire_engine_core_state{{{ENGINE},state="running"}} 1
"""


FRONTEND = """
stepwire_frontend_build_info 1
stepwire_frontend_requests_in_flight{client_class="other"} 5
stepwire_frontend_engine_up{engine_id="e1"} 1
stepwire_frontend_engine_up{engine_id="e2"} 0
"""


def shown(changes: dict[str, Change], failures: dict[str, str] | None = None) -> str:
    console = Console(width=160, record=True, color_system=None)
    console.print(top_tables.render(changes, failures or {}, [10.0]))
    return console.export_text()


def test_an_engine_and_a_frontend_are_shown_with_what_they_say():
    text = shown(
        {
            "h:9101": Change(look(0.0, engine(100)), look(2.0, engine(600))),
            "h:9100": Change(look(0.0, FRONTEND), look(2.0, FRONTEND)),
        }
    )
    assert all(part in text for part in ("e1", "running", "250ms", "97%", " 250 ", "1/2")), text


def calls(num: int) -> str:
    rpcs, http = "stepwire_frontend_rpcs_handled_total", "stepwire_frontend_http_requests_total"
    ends = [*(f'{rpcs}{{grpc_code="{code}"}}' for code in ("OK", "INTERNAL", "NOT_FOUND"))]
    ends += [f'{http}{{status="{status}"}}' for status in ("200", "500", "503", "504")]
    return FRONTEND + "".join(f"{end} {num}\n" for end in ends)


def test_calls_and_faults_are_those_of_grpc_and_http_together():
    text = shown({"h:9100": Change(look(0.0, calls(0)), look(1.0, calls(9)))})
    assert all(f" {rate} " in text for rate in ("63.0", "27.0")), text


def test_what_does_not_answer_or_is_something_else_is_named():
    text = shown({"h:1": Change(None, look(0.0, "up 1\n"))}, {"h:2": "no metrics: refused"})
    assert "h:1: serves no stepwire metrics" in text
    assert "h:2: no metrics: refused" in text


@pytest.fixture
def endpoint():
    registry = CollectorRegistry()
    Gauge("stepwire_engine_core_requests_running", "", ("model_name", "engine_id"), registry=registry).labels("m", "e")
    Counter("stepwire_engine_core_steps", "", registry=registry)
    Histogram("stepwire_engine_core_step_duration_seconds", "", registry=registry)
    port, close = serve_http(0, registry, lambda: True, lambda: True)
    yield f"127.0.0.1:{port}"
    close()


def test_once_looks_at_real_endpoints_and_ends(endpoint):
    result = CliRunner().invoke(app, ["top", endpoint, "--once", "--interval", "0.1"])
    assert result.exit_code == 0, result.output
    assert "engines of m" in result.output


def test_once_fails_when_an_endpoint_does_not_answer(endpoint):
    result = CliRunner().invoke(app, ["top", endpoint, "127.0.0.1:1", "--once", "--interval", "0.1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1: no metrics" in result.output
