"""Writes the Grafana dashboards beside this file from the panels of stepwire_client.monitor: `make dashboards`.

`--check` changes nothing and fails when a committed file differs. The JSON has the schema of Grafana 10.1, which newer
ones read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from stepwire_client.monitor.boards import BOARDS
from stepwire_client.monitor.panel import Board, Kind, Panel, Query

HERE = Path(__file__).parent
SOURCE = dashboard_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
# Panels of a row, of the 24 columns that Grafana has; and their height in its units.
WIDTH, HEIGHT = 8, 8
# Grafana's names of units are its own; these two have none there and are shown as they are.
SUFFIXES = {"tokens": "suffix: tokens", "tok/s": "suffix: tok/s"}

# name -> the query of its values.
VARIABLES = {
    "model": "label_values(stepwire_engine_core_requests_running, model_name)",
    "engine": 'label_values(stepwire_engine_core_requests_running{model_name=~"$model"}, engine_id)',
    "frontend": "label_values(stepwire_frontend_build_info, instance)",
}


def render(board: Board) -> str:
    """The dashboard as JSON text."""
    return str(JSONEncoder(sort_keys=True, indent=1).encode(_dashboard(board).build())) + "\n"


def path_of(board: Board) -> Path:
    """Where its JSON lies."""
    return HERE / f"{board.uid.removeprefix('stepwire-')}.json"


def _dashboard(board: Board) -> dashboard.Dashboard:
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["stepwire"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(dashboard_models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(_links())
        .annotation(_alerts())
    )
    for name, query in VARIABLES.items():
        built = built.with_variable(_variable(name, query))
    # Numbered here: Grafana numbers panels that have none anew at each import, and links to them break.
    ids = count(1)
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            built = built.with_panel(_panel(panel).id(next(ids)))
    return built


def _alerts() -> dashboard.AnnotationQuery:
    """Firing alerts of deploy/prometheus, as marks in all graphs."""
    return (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr('ALERTS{alertname=~"Stepwire.*",alertstate="firing"}')
    )


def _links() -> dashboard.DashboardLink:
    """To the other dashboards, with the same time and variables."""
    return (
        dashboard.DashboardLink("stepwire")
        .type(dashboard_models.DashboardLinkType.DASHBOARDS)
        .tags(["stepwire"])
        .keep_time(True)
        .include_vars(True)
    )


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(query)
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard_models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        # One expression instead of a long list of names; it also matches an engine that has no model yet.
        .all_value(".*")
        .current(dashboard_models.VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(panel: Panel) -> Any:
    built = _KINDS[panel.kind](panel)
    built = (
        built.title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(_unit(panel))
        .span(WIDTH)
        .height(HEIGHT)
    )
    for number, query in enumerate(panel.queries):
        built = built.with_target(_target(panel, query, chr(ord("A") + number)))
    return built


def _target(panel: Panel, query: Query, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref_id).range()
    return target.format(PromQueryFormat.HEATMAP) if panel.kind is Kind.HEATMAP else target


def _lines(panel: Panel) -> timeseries.Panel:
    built = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .fill_opacity(8)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if panel.kind is Kind.STACKED:
        built = built.fill_opacity(40).stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return built


def _heatmap(panel: Panel) -> Any:
    scheme = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").exponent(0.5).steps(64)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(scheme)
        .y_axis(heatmap.YAxisConfig().unit(_unit(panel)))
        .show_tooltip()
        .show_y_histogram()
    )


def _unit(panel: Panel) -> str:
    return SUFFIXES.get(panel.unit.value, panel.unit.value)


def _states(panel: Panel) -> Any:
    return statetimeline.Panel().show_value(common_models.VisibilityMode.NEVER)


_KINDS: dict[Kind, Callable[[Panel], Any]] = {
    Kind.LINES: _lines,
    Kind.STACKED: _lines,
    Kind.HEATMAP: _heatmap,
    Kind.STATES: _states,
}


def main() -> int:
    """Exit code: 0 done, 1 when a file differs under --check."""
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="only say which files differ")
    is_check = parser.parse_args().check
    stale = [
        path_of(board)
        for board in BOARDS
        if not path_of(board).exists() or path_of(board).read_text(encoding="utf-8") != render(board)
    ]
    if is_check:
        for path in stale:
            sys.stderr.write(f"error: {path} differs from the panels: run `make dashboards`\n")
        return 1 if stale else 0
    for board in BOARDS:
        path_of(board).write_text(render(board), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
