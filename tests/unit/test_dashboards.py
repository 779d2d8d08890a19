"""The dashboards of deploy/grafana: made from the panels, complete, and valid PromQL."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from deploy.grafana import build
from skips import require_program
from stepwire_client.monitor.boards import BOARDS
from stepwire_client.monitor.promql import VARIABLES, WINDOW

PANELS = [panel for board in BOARDS for panel in board.panels()]


def committed(board):
    return json.loads(build.path_of(board).read_text(encoding="utf-8"))


def drawn(board):
    return [panel for panel in committed(board)["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_the_committed_dashboard_is_made_from_the_panels(board):
    assert build.path_of(board).read_text(encoding="utf-8") == build.render(board), "run `make dashboards`"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_has_a_unit_a_description_a_source_and_a_number(board):
    for panel in drawn(board):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    numbers = [panel["id"] for panel in committed(board)["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_dashboard_has_the_variables_that_its_expressions_use(board):
    names = {variable["name"] for variable in committed(board)["templating"]["list"]}
    assert names == {"datasource", "model", "engine", "frontend"}


def test_titles_are_unique():
    titles = [panel.title for panel in PANELS]
    assert len(set(titles)) == len(titles)


def test_every_series_of_panels_and_rules_is_served():
    rules = (build.HERE.parent / "prometheus" / "rules.yaml").read_text(encoding="utf-8")
    served = (build.HERE.parent.parent / "tests" / "golden" / "metrics.txt").read_text(encoding="utf-8")
    drawn_ones = json.dumps([committed(board) for board in BOARDS])
    used = re.findall(r"stepwire_(?:frontend|engine_core)_\w+", rules + drawn_ones)
    wanted = {re.sub("_(bucket|sum|count|total)$", "", name) for name in used}
    assert len(wanted) > 70
    assert wanted <= {re.sub("_total$", "", name) for name in re.findall(r"^stepwire_\w+", served, re.MULTILINE)}


def test_every_expression_is_valid(tmp_path):
    promtool = require_program("promtool", how="apt-get install prometheus (make system-deps)")
    rules = [
        {"record": f"panel:{number}", "expr": query.expr.replace(WINDOW, "1m")}
        for number, query in enumerate(query for panel in PANELS for query in panel.queries)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_expression_keeps_to_the_chosen_model_engine_or_frontend():
    for panel in PANELS:
        for query in panel.queries:
            is_of_process = re.search("process_|engine_core_(gc|log|interpreter)_", query.expr)
            assert is_of_process or any(variable in query.expr for variable in VARIABLES[:3]), query.expr
