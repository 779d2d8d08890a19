"""Behind everything else: what the pods have logged."""

from __future__ import annotations

import json

import pytest

from cluster_kubectl import KubectlError
from cluster_stack import ClusterStack


@pytest.mark.parametrize("component", ["frontend", "engine-core"])
def test_every_line_is_json_and_none_has_a_stack_trace(stack: ClusterStack, component: str) -> None:
    for pod in stack.pods(component):
        name = pod["metadata"]["name"]
        lines = stack.kubectl("logs", name).splitlines()
        assert lines, f"{name} has logged nothing"
        for line in lines + previous_lines(stack, name):
            assert isinstance(json.loads(line), dict)
            assert "Traceback" not in line, line


def previous_lines(stack: ClusterStack, pod: str) -> list[str]:
    """Of the container before the last restart; there may have been none."""
    try:
        return stack.kubectl("logs", pod, "--previous").splitlines()
    except KubectlError:
        return []
