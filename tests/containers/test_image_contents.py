"""What is in the images and what is not: sizes, users, packages, and nothing of the machine that built them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from running_containers import BASE_IMAGE, image_of, manifest_of, podman, require_images

pytestmark = pytest.mark.containers

MB = 10**6
# Above the base image.
LIMITS_BYTES = {"frontend": 350 * MB, "engine-core": 1800 * MB}


@pytest.fixture(autouse=True)
def _images() -> None:
    require_images()


def image(service: str) -> str:
    return image_of(manifest_of(service))


@cache
def inspect(name: str) -> dict[str, Any]:
    [description] = json.loads(podman("image", "inspect", name))
    return description


def inside(name: str, *command: str) -> str:
    """What a program of the image prints; as root, which may read all of it."""
    entrypoint, *arguments = command
    flags = ("--rm", "--network", "none", "--read-only", "--user", "0:0", "--entrypoint", entrypoint)
    return podman("run", *flags, name, *arguments)


@pytest.mark.parametrize("service", LIMITS_BYTES)
def test_an_image_is_not_larger_than_the_documents_say(service: str):
    size = inspect(image(service))["Size"] - inspect(BASE_IMAGE)["Size"]
    assert size <= LIMITS_BYTES[service], f"{size / MB:.0f} MB above the base"


def test_the_frontend_has_no_torch_and_no_image_has_a_compiler_or_pip():
    find = "import importlib.util as u, shutil; print(*map(bool, map({}, {})))"
    modules = find.format("u.find_spec", ["torch", "transformers", "pip"])
    programs = find.format("shutil.which", ["gcc", "g++", "pip", "stepwire-probe"])
    for service, has_torch in (("frontend", "False False"), ("engine-core", "True True")):
        assert inside(image(service), "python", "-c", modules).strip() == f"{has_torch} False"
        assert inside(image(service), "python", "-c", programs).strip() == "False False False True"


@pytest.mark.parametrize(("service", "module"), [("frontend", "frontend"), ("engine-core", "engine_core")])
def test_an_image_says_what_it_is_and_how_it_runs(service: str, module: str):
    description = inspect(image(service))
    config = description["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["/opt/venv/bin/python", "-m", module]
    assert config["StopSignal"] == "SIGTERM"
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items() if "opencontainers" in name}
    assert labels["version"] == "0.1.0"
    assert labels["licenses"] == "Apache-2.0"
    assert len(labels["revision"]) == 40


@pytest.mark.parametrize("service", LIMITS_BYTES)
def test_an_image_has_nothing_of_the_machine_that_built_it(service: str):
    name = image(service)
    # What builds mount, and where it would lie: pip's configuration, and wheels of an own index.
    leftovers = inside(
        name, "sh", "-c", "ls -A /mnt /run/secrets /root/.cache /root/.config /etc/pip.conf 2>/dev/null; true"
    )
    assert not [line for line in leftovers.splitlines() if line and not line.endswith(":")]
    assert inside(name, "ls", "/opt").split() == [*(["stepwire"] if service == "engine-core" else []), "venv"]
    certificates = ("sha256sum", "/etc/ssl/certs/ca-certificates.crt")
    assert inside(name, *certificates) == inside(BASE_IMAGE, *certificates)
    assert not [value for value in inspect(name)["Config"]["Env"] if value.startswith(("PIP_", "SSL_", "REQUESTS_"))]


@pytest.mark.parametrize("service", LIMITS_BYTES)
def test_nothing_in_an_image_but_its_cache_belongs_to_its_user(service: str):
    owned = inside(image(service), "find", "/", "-xdev", "-uid", "10001", "-not", "-path", "/proc/*")
    assert owned.split() == ["/var/cache/stepwire"]
