"""The rules of deploy/prometheus as promtool sees them: each alert fires when it should, and is silent otherwise."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fakes.alert_cases import CASES, AlertCase, Series
from skips import require_program
from stepwire_client.monitor.faults import FAULTY_HTTP, FAULTY_RPCS, HTTP, RPCS

RULES = Path(__file__).parent.parent.parent / "deploy" / "prometheus" / "rules.yaml"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def promtool() -> str:
    return require_program("promtool", how="apt-get install prometheus (make system-deps)")


def run(promtool: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def firing(case: AlertCase, series: Series, expected: list[dict[str, Any]]) -> dict[str, Any]:
    selector = f'ALERTS{{alertname="{case.alert}",severity="{case.severity}",alertstate="firing"}}'
    return {
        "name": f"{case.alert} {case.severity} {'fires' if expected else 'is silent'}: {series}",
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"count by (alertname) (count_over_time({selector}[1d]))",
                "eval_time": f"{case.minutes}m",
                "exp_samples": expected,
            }
        ],
    }


def cases_of(case: AlertCase) -> list[dict[str, Any]]:
    fired = [{"labels": f'{{alertname="{case.alert}"}}', "value": 1}]
    return [firing(case, case.fires, fired), *(firing(case, series, []) for series in case.silent)]


def write_tests(path: Path, tests: list[dict[str, Any]], evaluation_interval: str = "30s") -> str:
    content = {"rule_files": [str(RULES)], "evaluation_interval": evaluation_interval, "tests": tests}
    # JSON is YAML.
    path.write_text(json.dumps(content))
    return str(path)


def test_the_rules_are_valid(promtool):
    code, output = run(promtool, "check", "rules", str(RULES))
    assert code == 0, output


def test_the_alerts_and_the_dashboards_agree_on_what_a_fault_is():
    text = RULES.read_text(encoding="utf-8")
    for counter, faulty in ((RPCS, FAULTY_RPCS), (HTTP, FAULTY_HTTP)):
        assert f"rate({counter}{{{faulty}}}[5m])" in text


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    assert {case.alert for case in CASES if case.silent} == set(ALERTS)


# Hours are looked at more coarsely.
@pytest.mark.parametrize(("evaluation_interval", "least", "most"), [("30s", 0, 20), ("5m", 21, 400)])
def test_each_alert_fires_when_it_should_and_not_otherwise(promtool, tmp_path, evaluation_interval, least, most):
    tests = [test for case in CASES if least <= case.minutes <= most for test in cases_of(case)]
    path = write_tests(tmp_path / "tests.yaml", tests, evaluation_interval)
    code, output = run(promtool, "test", "rules", path)
    assert code == 0, output


def test_a_wrong_expectation_is_noticed(promtool, tmp_path):
    case = CASES[0]
    fired = [{"labels": f'{{alertname="{case.alert}"}}', "value": 1}]
    for number, wrong in enumerate((firing(case, case.fires, []), firing(case, case.silent[0], fired))):
        code, output = run(promtool, "test", "rules", write_tests(tmp_path / f"{number}.yaml", [wrong]))
        assert code == 1, output
