"""What can be read of the images: users, pins, the frontend without torch; and their probe at work."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from free_ports import free_port
from manifests import K8S, OVERLAYS, containers_of, render, workloads

ROOT = K8S.parent
DOCKER = ROOT / "deploy" / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILES = {name: ROOT / "services" / name / "Dockerfile" for name in ("frontend", "engine_core")}


def instructions(name: str) -> list[str]:
    """The lines of a Dockerfile, continuations joined, without comments."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILES[name].read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_all_stages_come_from_one_base_image_that_can_be_chosen(name: str):
    lines = instructions(name)
    assert lines[0].startswith("ARG BASE_IMAGE=")
    stages = [line.split() for line in lines if line.startswith("FROM ")]
    assert [stage[1] for stage in stages if stage[1] not in {known[3] for known in stages}] == ["${BASE_IMAGE}"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_process_is_number_1_of_a_user_without_privileges(name: str):
    lines = instructions(name)
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    assert f'ENTRYPOINT ["/opt/venv/bin/python", "-m", "{name}"]' in lines
    assert "STOPSIGNAL SIGTERM" in lines
    # Kubernetes would ignore it, and OCI images do not carry it.
    assert not any(line.startswith("HEALTHCHECK") for line in lines)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_process_knows_the_commit_of_its_image(name: str):
    lines = instructions(name)
    [environment] = [number for number, line in enumerate(lines) if "STEPWIRE_BUILD_REVISION=${REVISION}" in line]
    # Arguments end with their stage.
    stage = max(number for number, line in enumerate(lines[:environment]) if line.startswith("FROM "))
    assert "ARG REVISION=unknown" in lines[stage:environment]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_installed_is_pinned_by_hash(name: str):
    installs = re.findall(r"pip (?:--python \S+ )?install [^&;]*", " ".join(instructions(name)))
    assert len(installs) >= 3
    for install in installs:
        assert "--require-hashes" in install or "--no-index" in install or '"${TORCH_CPU}"' in install


@pytest.mark.parametrize("name", DOCKERFILES)
def test_everything_that_is_copied_is_in_the_context(name: str):
    admitted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = [line.split()[1:-1] for line in instructions(name) if line.startswith("COPY ") and "--from" not in line]
    for source in (source for sources in copies for source in sources if source != "."):
        assert source.startswith(tuple(admitted)), source
        for variant in ("cuda", "cpu"):
            assert (ROOT / source.replace("${TORCH_VARIANT}", variant)).exists(), source


def test_what_links_of_the_context_point_to_is_in_it_too():
    admitted = [ROOT / line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    links = [link for path in admitted for link in (path, *path.rglob("*")) if link.is_symlink()]
    assert links
    for link in links:
        assert any(link.resolve().is_relative_to(path) for path in admitted), link


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock file; every one has hashes."""
    entries = re.split(r"\n(?=\w)", (DOCKER / name).read_text(encoding="utf-8").strip())
    assert all("--hash=sha256:" in entry for entry in entries)
    return dict(entry.split()[0].split("==") for entry in entries)


@pytest.mark.parametrize(
    ("name", "extras", "apart"),
    [
        ("frontend.lock", ("frontend", "compat"), ()),
        ("engine-core-cuda.lock", ("engine",), ()),
        # Its CPU build comes from an index of its own.
        ("engine-core-cpu.lock", ("engine",), ("torch",)),
    ],
)
def test_a_lock_file_has_what_the_project_asks_for(name: str, extras: tuple[str, ...], apart: tuple[str, ...]):
    versions = locked(name)
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    for requirement in (Requirement(text) for texts in lists for text in texts):
        if requirement.name not in apart:
            assert requirement.specifier.contains(versions[requirement.name], prereleases=True), requirement


def test_the_image_of_the_frontend_has_nothing_of_the_engine():
    assert not {"torch", "transformers", "safetensors", "accelerate", "triton"} & set(locked("frontend.lock"))


def test_the_cpu_image_has_nothing_of_cuda():
    assert not [
        package for package in locked("engine-core-cpu.lock") if package.startswith(("nvidia", "cuda", "triton"))
    ]


def test_overlays_name_the_images_of_this_version():
    version = PROJECT["version"]
    built = {f"stepwire/frontend:{version}"} | {
        f"stepwire/engine-core:{version}-{kind}" for kind in ("cuda", "embedded")
    }
    used = {
        container["image"]
        for build in OVERLAYS
        for workload in workloads(render(build))
        for container in containers_of(workload)
        if container["image"].startswith("stepwire/")
    }
    assert used == built
    assert f"VERSION ?= {version}" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.fixture
def half_ready_port() -> Iterator[int]:
    """A process that is alive and not ready."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(200 if self.path == "/healthz" else 503)

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def probe(*args: str) -> int:
    command = [sys.executable, "-I", "-S", str(DOCKER / "stepwire-probe"), *args]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode


def test_the_probe_tells_alive_from_ready(half_ready_port: int):
    assert probe("live", str(half_ready_port)) == 0
    assert probe("ready", str(half_ready_port)) == 1


def test_the_probe_of_a_port_that_nobody_listens_on_fails():
    port = str(free_port())
    assert probe("live", port) == 1
    assert probe("alive", port) == 2


def test_the_probe_can_be_run_as_a_program():
    assert Path(DOCKER / "stepwire-probe").stat().st_mode & 0o111
