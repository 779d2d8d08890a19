"""What the builds of `make test-images` take from this machine's pip."""

from __future__ import annotations

import os
import runpy
import subprocess
from configparser import ConfigParser
from pathlib import Path

from manifests import K8S

SCRIPT = runpy.run_path(str(K8S.parent / "scripts" / "test-images"))


def test_what_pip_is_told_of_files_is_mounted_over_what_every_base_image_has():
    text, flags = SCRIPT["in_build"]({"cert": "/own/ca.pem", "find-links": "/own/wheels", "index-url": "https://own"})
    configuration = ConfigParser()
    configuration.read_string(text)
    assert dict(configuration["global"]) == {
        "cert": "/etc/ssl/certs/ca-certificates.crt",
        "find-links": "/mnt",
        "index-url": "https://own",
    }
    mounts = ["/own/ca.pem:/etc/ssl/certs/ca-certificates.crt:ro", "/own/wheels:/mnt:ro"]
    assert flags == ["--volume", mounts[0], "--volume", mounts[1]]


def test_an_index_on_this_disk_is_left_out():
    text, flags = SCRIPT["in_build"]({"extra-index-url": "file:///own/simple", "timeout": "60"})
    assert text == "[global]\ntimeout = 60\n"
    assert flags == []


def build(**variables: str) -> subprocess.CompletedProcess[str]:
    """`make images` of the frontend."""
    command = ["make", "images", "IMAGES=frontend", *(f"{name}={value}" for name, value in variables.items())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, env=environment, cwd=K8S.parent, capture_output=True, text=True, timeout=60, check=False
    )


def test_images_are_built_by_the_program_that_is_named(tmp_path: Path):
    program = tmp_path / "builder"
    program.write_text('#!/bin/sh\necho "built by $0: $*"\n')
    program.chmod(0o755)
    done = build(BUILDER=str(program), IMAGE_PREFIX="registry.example/stepwire")
    assert done.returncode == 0, done.stderr
    assert f"built by {program}: build --file services/frontend/Dockerfile" in done.stdout
    assert "--tag registry.example/stepwire/frontend:" in done.stdout


def test_a_builder_that_is_not_there_is_named():
    done = build(BUILDER="no-such-builder")
    assert done.returncode != 0
    assert "error: BUILDER: there is no program no-such-builder" in done.stderr
