"""`stepwire report`: charts, axes, legends, and what the command says when there is nothing to ask."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest
from typer.testing import CliRunner

from stepwire_client.cli import app
from stepwire_client.monitor import axes, chart, report
from stepwire_client.monitor.boards import BOARDS
from stepwire_client.monitor.chart import Line
from stepwire_client.monitor.panel import Kind, Panel, Query, Unit
from stepwire_client.monitor.prometheus import Series, Span, parse_duration

SPAN = Span(0.0, 100.0, 10.0)


def panel(kind: Kind) -> Panel:
    return Panel("Title", "About.", Unit.COUNT, (Query("up", "{{le}}"),), kind)


@pytest.mark.parametrize(
    ("text", "seconds"), [("15m", 900), ("1h30m", 5400), ("90s", 90), ("500ms", 0.5), ("2d", 172800)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "15", "m", "15x", "0s", "-1m", "1.2.3s"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize("top", [0.0, 0.003, 0.97, 1, 7, 999, 1e9])
def test_ticks_are_few_round_and_reach_the_top(top):
    ticks = axes.round_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top
    assert 2 <= len(ticks) <= 6


def test_ticks_of_bytes_are_round_as_they_are_written():
    ticks = axes.unit_ticks(700 * 1024**2, Unit.BYTES)
    assert [axes.text_of(tick, Unit.BYTES) for tick in ticks] == ["0 B", "200 MiB", "400 MiB", "600 MiB", "800 MiB"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, Unit.SECONDS, "12.3 ms"),
        (0.00002, Unit.SECONDS, "20 µs"),
        (2.5, Unit.SECONDS, "2.5 s"),
        (0.856, Unit.RATIO, "85.6 %"),
        (3 * 1024**2, Unit.BYTES_PER_SECOND, "3 MiB/s"),
        (1234, Unit.TOKENS_PER_SECOND, "1.23 k tok/s"),
        (0, Unit.COUNT, "0"),
        (250, Unit.COUNT, "250"),
    ],
)
def test_values_are_written_with_their_unit(value, unit, text):
    assert axes.text_of(value, unit) == text


def test_no_line_is_drawn_through_what_nobody_measured():
    line = Line("a", [(0.0, 1.0), (10.0, 1.0), (50.0, 2.0), (60.0, 2.0)])
    assert chart.draw(panel(Kind.LINES), [line], SPAN).count("<polyline") == 2


def test_areas_lie_on_each_other():
    lines = [Line("a", [(0.0, 1.0), (10.0, 1.0)]), Line("b", [(0.0, 1.0), (10.0, 1.0)])]
    drawn = chart.draw(panel(Kind.STACKED), lines, SPAN)
    assert drawn.count("<polygon") == 2
    # The sum is the top of the axis.
    assert ">2</text>" in drawn


def test_a_heat_map_shows_each_bucket_without_those_below():
    lines = [Line("1.0", [(0.0, 4.0)]), Line("5.0", [(0.0, 4.0)]), Line("+Inf", [(0.0, 6.0)])]
    drawn = chart.draw(panel(Kind.HEATMAP), lines, SPAN)
    assert drawn.count("<rect") == 2
    assert ">more</text>" in drawn


def test_names_come_from_labels_and_are_escaped():
    series = Series({"le": "<b>"}, ((0.0, 1.0),))
    assert report.name_of("{{le}} of {{nothing}}", series) == "<b> of"
    assert "<b>" not in chart.draw(panel(Kind.HEATMAP), [Line("+Inf", [(0.0, 1.0)])], SPAN)


class Answers(BaseHTTPRequestHandler):
    """A Prometheus that knows one series."""

    def do_GET(self):
        asked = urlparse(self.path)
        values = [[float(parse_qs(asked.query).get("start", ["0"])[0]) + 1, "NaN"], [1e9, "2"]]
        found = [{"metric": {"engine_id": "<e>"}, "values": values}] if "requests_running" in self.path else []
        data = {"activeTargets": []} if "targets" in self.path else {"result": found}
        body = json.dumps({"status": "success", "data": data}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def prometheus():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_panels_without_data_say_what_they_wait_for(prometheus, tmp_path):
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", "--prometheus", prometheus, "--end", "1000000050", "--output", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    num_panels = sum(len(list(board.panels())) for board in BOARDS)
    assert text.count("No data") == num_panels - 1
    assert "No data: it takes an engine that dies" in text
    assert "&lt;e&gt; running" in text


def test_without_a_server_it_is_one_sentence(tmp_path):
    done = CliRunner().invoke(app, ["report", "--prometheus", "http://127.0.0.1:1", "--output", str(tmp_path / "x")])
    assert done.exit_code == 1
    assert "no Prometheus at http://127.0.0.1:1" in done.output


def test_a_wrong_span_is_wrong_usage(tmp_path):
    assert CliRunner().invoke(app, ["report", "--last", "soon"]).exit_code == 2
