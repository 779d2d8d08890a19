"""What the builds of `make test-images` take from this machine's pip."""

from __future__ import annotations

import runpy
from configparser import ConfigParser

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
