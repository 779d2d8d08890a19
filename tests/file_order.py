"""The order in which the files of tests start when several run at the same time, so that none is left to run alone.

A plugin of pytest, for the workers of xdist; without them the order is that of the directories.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

# Files with a test of half a minute or more, and about how many seconds the file takes beside two others. One that is
# not here starts later and costs nothing but that.
SECONDS = {
    "integration/test_metrics_totals.py": 150,
    "property/test_scheduler_machine.py": 130,
    "e2e/test_multiproc_service.py": 130,
    "e2e/test_greedy_equality.py": 130,
    "e2e/test_run_and_cli.py": 120,
    "e2e/test_death_and_drain.py": 100,
    "e2e/test_model_runner_vs_transformers.py": 90,
    "e2e/test_resuming_clients.py": 80,
    "e2e/test_prometheus.py": 75,
    "k8s/test_cluster_suite.py": 70,
    "integration/test_public_port.py": 65,
    "unit/test_bench_gpu.py": 65,
    "integration/test_storm.py": 60,
    "integration/test_several_engines.py": 60,
    "integration/test_cancel_fuzz.py": 45,
    "arch/test_frontend_without_torch.py": 40,
    "e2e/test_rollouts.py": 40,
}
TESTS = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by file: the long ones by their time, then those with most tests; inside a file nothing changes."""
    if hasattr(config, "workerinput"):
        num_tests = Counter(item.path for item in items)
        items.sort(key=lambda item: place(item.path, num_tests[item.path]))


def place(path: Path, num_tests: int) -> tuple[int, int, str]:
    """The smaller, the earlier."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else path.as_posix()
    return -SECONDS.get(name, 0), -num_tests, name
