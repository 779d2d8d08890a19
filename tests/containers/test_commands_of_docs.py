"""The commands of docs/operations/images.md, as they stand there but for names and ports."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from running_containers import CONFIGURATION, PREFIX, podman, require_images

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "images.md"
BLOCK = re.compile(r"(?ms)^<!-- runs in containers -->\n+```sh\n(.*?)^```$")
# Names that a developer's own containers may have.
OWN_NAMES = re.compile(r"\bstepwire-(?:net|engine|frontend)\b")


def commands() -> str:
    [block] = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    renamed = OWN_NAMES.sub(lambda name: f"documented-{name[0]}-{os.getpid()}", block)
    return renamed.replace(" stepwire/", f" {PREFIX}/").replace("127.0.0.1:50051:50051", "127.0.0.1::50051")


def test_the_commands_of_the_page_run():
    require_images()
    environment = {"CONTAINERS_CONF": str(CONFIGURATION), **os.environ}
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands()],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "8 completion tokens" in done.stdout + done.stderr
    finally:
        names = [f"documented-stepwire-{service}-{os.getpid()}" for service in ("frontend", "engine")]
        podman("rm", "--force", "--ignore", "--volumes", "--time", "0", *names)
        podman("network", "rm", "--force", f"documented-stepwire-net-{os.getpid()}")
