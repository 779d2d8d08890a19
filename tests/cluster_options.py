"""What `make test-cluster` was told, by variables of the environment; and the namespace of a run."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMESPACE_PREFIX = "stepwire-test-"
FILTER_TIMEOUT_S = 60
LOAD_TIMEOUT_S = 600


def new_namespace() -> str:
    """A name that nobody has: a run never shares a namespace."""
    return NAMESPACE_PREFIX + secrets.token_hex(4)


@dataclass(frozen=True)
class Options:
    """`render` and `image_load` are command lines; empty = there is none."""

    overlay: Path
    image_prefix: str = "stepwire"
    image_tag: str = ""
    render: str = ""
    image_load: str = ""
    keeps_namespace: bool = False
    is_required: bool = False
    namespace: str = field(default_factory=new_namespace)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Options:
        """Raises ValueError for an overlay that is not there."""
        overlay = ROOT / (variables.get("OVERLAY") or "k8s/overlays/test")
        if not (overlay / "kustomization.yaml").is_file():
            raise ValueError(f"OVERLAY: there is no kustomization in {overlay}")
        return cls(
            overlay=overlay,
            image_prefix=variables.get("IMAGE_PREFIX") or "stepwire",
            image_tag=variables.get("IMAGE_TAG", ""),
            render=variables.get("RENDER", ""),
            image_load=variables.get("IMAGE_LOAD", ""),
            keeps_namespace=variables.get("KEEP") == "1",
            is_required=variables.get("STEPWIRE_REQUIRE_CLUSTER") == "1",
        )

    def filtered(self, text: str) -> str:
        """The manifests as the program RENDER wants them. Raises CalledProcessError with what it says."""
        if not self.render:
            return text
        command = shlex.split(self.render)
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=True, timeout=FILTER_TIMEOUT_S, cwd=ROOT
        )
        return done.stdout

    def load_images(self, images: Sequence[str]) -> None:
        """Let IMAGE_LOAD put them into the cluster; its arguments are their names."""
        if self.image_load:
            subprocess.run([*shlex.split(self.image_load), *images], check=True, timeout=LOAD_TIMEOUT_S, cwd=ROOT)
