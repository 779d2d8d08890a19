"""Both images at work with a read-only root, no capabilities and no privileges: answers, probes, drains, deaths."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from running_containers import (
    Container,
    Pair,
    anonymous_container,
    image_of,
    manifest_of,
    podman,
    require_images,
    running_pair,
    stopping,
)
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

TIMEOUT_S = 180.0
# Tokens of an answer that runs for seconds, also on an idle machine, and ends within the drain, also on a busy one.
NUM_LONG = 300
PROCESS_1 = """
status = dict(line.split(":", 1) for line in open("/proc/1/status"))
print(open("/proc/1/cmdline").read().replace("\\0", " ").strip())
print(*(status[name].split()[0] for name in ("Uid", "Gid", "CapEff", "CapBnd", "NoNewPrivs")))
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with running_pair() as pair:
        yield pair


def request_of(max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        text="Once upon a time",
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=common_pb2.OutputOptions(token_ids=True),
    )


def streamed(frontend: Container, max_tokens: int) -> list[int]:
    """The tokens of an answer that was streamed to its end."""
    with frontend.generation() as generation:
        responses = list(generation.GenerateStream(request_of(max_tokens), timeout=TIMEOUT_S))
    assert "".join(response.delta.text for response in responses).strip()
    return [token for response in responses for token in response.delta.token_ids]


def test_an_answer_is_streamed_from_the_model_in_the_image(pair: Pair):
    assert len(streamed(pair.frontend, 16)) == 16


def test_the_command_of_the_readme_generates_inside_the_frontend(pair: Pair):
    assert pair.frontend.execute("stepwire", "generate", "Once upon a time", "--max-tokens", "4").strip()


def test_process_1_is_python_without_any_privilege(pair: Pair):
    for container, package in ((pair.frontend, "frontend"), (pair.engine, "engine_core")):
        command, privileges = container.execute("python", "-c", PROCESS_1).strip().splitlines()
        assert command == f"/opt/venv/bin/python -m {package}"
        assert privileges == "10001 10001 0000000000000000 0000000000000000 1"


def test_the_probe_tells_that_both_are_well(pair: Pair):
    for container in (pair.frontend, pair.engine):
        assert container.answers_probe("live")
        assert container.answers_probe("ready")


def test_nothing_is_tried_to_be_written_outside_the_mount_and_nothing_is_compiled(pair: Pair):
    streamed(pair.frontend, 4)
    for container in (pair.frontend, pair.engine):
        log = container.log()
        assert "Read-only file system" not in log
        assert "Permission denied" not in log
        assert "Traceback" not in log
        assert "compiling" not in log
    assert "kernels" in pair.engine.log()


def test_the_memory_limits_leave_room_over_a_load_of_many_answers(pair: Pair):
    with pair.frontend.generation() as generation:
        calls = [generation.GenerateStream(request_of(64), timeout=TIMEOUT_S) for _ in range(16)]
        assert all(list(call) for call in calls)
    for container in (pair.frontend, pair.engine):
        status = dict(line.split(":", 1) for line in container.execute("cat", "/proc/1/status").splitlines())
        peak_bytes = int(status["VmHWM"].split()[0]) * 1024
        limit_bytes = int(container.inspect("{{.HostConfig.Memory}}"))
        assert peak_bytes * 1.3 < limit_bytes, f"{container.service}: {peak_bytes / 2**20:.0f} MiB"


@pytest.mark.parametrize("service", ["frontend", "engine"])
def test_a_stop_lets_a_running_answer_come_to_its_end(pair: Pair, service: str):
    stopped: Container = getattr(pair, service)
    with stopped.health() as statuses, pair.frontend.generation() as generation, ThreadPoolExecutor(1) as executor:
        call = generation.GenerateStream(request_of(NUM_LONG), timeout=TIMEOUT_S)
        num_tokens = [len(next(call).delta.token_ids)]
        # Read at once, so that what has come before the stop is not taken for what comes after it.
        reader = executor.submit(lambda: num_tokens.extend(len(response.delta.token_ids) for response in call))
        with stopping(stopped):
            assert False in statuses
            num_before = sum(num_tokens)
            reader.result()
    assert num_before < sum(num_tokens) == NUM_LONG
    assert stopped.inspect("{{.State.ExitCode}}") == "0"
    podman("start", stopped.name)
    for container in (pair.engine, pair.frontend):
        container.wait_for_health(True)


@pytest.mark.parametrize(("service", "module"), [("frontend", "frontend"), ("engine-core", "engine_core")])
def test_a_stop_while_the_service_is_being_imported_ends_it(service: str, module: str):
    require_images()
    # As far as imports go, and no further: the settings are not read.
    code = f"import {module}.__main__, time; print('imported', flush=True); time.sleep(600)"
    image = image_of(manifest_of(service))
    with anonymous_container("--network=none", "--entrypoint=python", image, "-c", code) as name:
        while "imported" not in podman("logs", name):
            assert podman("inspect", "--format", "{{.State.Running}}", name).strip() == "true"
        podman("stop", "--time", "30", name)
        assert podman("inspect", "--format", "{{.State.ExitCode}}", name).strip() == "0"


def test_a_killed_engine_makes_the_frontend_unready_until_it_is_back(pair: Pair):
    expected = streamed(pair.frontend, 16)
    podman("kill", "--signal", "KILL", pair.engine.name)
    assert pair.engine.wait_until_ended() == 128 + 9
    pair.frontend.wait_for_health(False)
    assert pair.frontend.answers_probe("live")
    assert not pair.frontend.answers_probe("ready")
    podman("start", pair.engine.name)
    pair.frontend.wait_for_health(True)
    assert streamed(pair.frontend, 16) == expected
