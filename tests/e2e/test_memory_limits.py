"""The memory limits of the overlay cpu leave room above what its processes take under load, with the real model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from manifests import Build, Manifest, containers_of, environment_of, render, workloads
from running_stack import SERVING, Service, running_stack
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 200.0
HEADROOM = 1.3
NUM_STREAMS = 16
MIB = 2**20
UNITS = {"Mi": MIB, "MiB": MIB, "Gi": 1024 * MIB, "GiB": 1024 * MIB}


def bytes_of(quantity: str) -> int:
    """512Mi or 512MiB in bytes."""
    number, unit = re.fullmatch(r"(\d+)(\w+)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def peak_bytes(service: Service) -> int:
    """The most that was resident at once; an engine on one device has no worker processes."""
    status = Path(f"/proc/{service.process.pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024  # type: ignore[index]


def containers() -> dict[str, Manifest]:
    items = render(Build("overlays/cpu"))
    found = (container for workload in workloads(items) for container in containers_of(workload))
    return {item["name"]: {**item, "environment": environment_of(items, item)} for item in found}


@pytest.fixture(scope="module")
def peaks(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Service -> its peak, with the engine's settings of the overlay, behind long prompts and many streams at once."""
    variables = containers()["engine-core"]["environment"]
    flags = ("--kv-cache-memory", variables["STEPWIRE_KV_CACHE_MEMORY"], "--num-threads", "1", "--device", "cpu")
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        engine = stack.engine(*flags)
        frontend = stack.frontend(engine)
        frontend.wait_for_health(SERVING)

        def ask(number: int) -> int:
            request: Any = GenerateRequest(text=f"{number} " + "once upon a time " * (4 + 4 * number))
            request.stop.max_tokens, request.stop.ignore_eos = 8, True
            events = list(frontend.generation.GenerateStream(request, timeout=TIMEOUT_S))
            return int(events[-1].finished.usage.completion_tokens)

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            assert list(pool.map(ask, range(NUM_STREAMS))) == [8] * NUM_STREAMS
        yield {"engine-core": peak_bytes(engine), "frontend": peak_bytes(frontend)}


def test_the_engine_has_room_above_its_peak_with_a_full_cache(peaks: dict[str, int]):
    container = containers()["engine-core"]
    limit = bytes_of(container["resources"]["limits"]["memory"])
    # Blocks that no request has used yet are not resident, so the whole cache is counted once more.
    peak = peaks["engine-core"] + bytes_of(container["environment"]["STEPWIRE_KV_CACHE_MEMORY"])
    assert limit > HEADROOM * peak, f"the engine took {peaks['engine-core'] / MIB:.0f} MiB, its cache left out"


def test_the_frontend_has_room_above_its_peak(peaks: dict[str, int]):
    limit = bytes_of(containers()["frontend"]["resources"]["limits"]["memory"])
    assert limit > HEADROOM * peaks["frontend"], f"the frontend took {peaks['frontend'] / MIB:.0f} MiB"
