"""A deployed stack answers, from inside and from outside, and writes nowhere but into its volumes."""

from __future__ import annotations

import pytest

from cluster_manifests import CLIENT
from cluster_stack import NUM_STREAMS, PYTHON, ClusterStack
from rollout_load import Answer
from stepwire.v1.generation_service_pb2 import GenerateRequest
from stepwire_client import Client

# Ends with the names of those that could be written.
_WRITE = """
import pathlib, sys
for name in sys.argv[1:]:
    try:
        (pathlib.Path(name) / "stepwire-test").touch()
        print(name)
    except OSError:
        pass
"""


def test_every_pod_is_ready_and_was_never_restarted(stack: ClusterStack) -> None:
    for pod in (*stack.pods("frontend"), *stack.pods("engine-core")):
        assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [0]
        assert all(status["ready"] for status in pod["status"]["containerStatuses"])


def test_an_answer_is_streamed_through_a_forwarded_port(stack: ClusterStack) -> None:
    with stack.forwarded("service/stepwire-frontend", 50051) as port, Client(f"127.0.0.1:{port}") as client:
        request = GenerateRequest(text="Once upon a time", stop={"max_tokens": 8, "ignore_eos": True})
        events = list(client.generate_stream(request, timeout_s=120))
    assert "".join(event.delta.text for event in events).strip()
    assert events[-1].HasField("finished")


def test_answers_are_streamed_to_a_pod(undisturbed: list[Answer]) -> None:
    assert {answer.number for answer in undisturbed} == set(range(NUM_STREAMS))
    assert len({answer.token_ids for answer in undisturbed}) > 1


def test_the_command_of_the_image_answers(stack: ClusterStack, undisturbed: list[Answer]) -> None:
    target = stack.target
    said = stack.kubectl.execute(CLIENT, "stepwire", "generate", "Once upon a time", "--target", target)
    assert said.strip()


@pytest.mark.parametrize("component", ["frontend", "engine-core"])
def test_the_root_file_system_can_not_be_written(stack: ClusterStack, component: str) -> None:
    pod = stack.pods(component)[0]["metadata"]["name"]
    places = ["/", "/etc", "/opt/venv", "/tmp", "/usr", "/var", "/var/cache/stepwire"]
    written = stack.kubectl.execute(pod, PYTHON, "-c", _WRITE, *places).split()
    assert written == ["/var/cache/stepwire"]
