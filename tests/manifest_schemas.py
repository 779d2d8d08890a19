"""The manifests of k8s/ against the schemas of Kubernetes itself and of the operators whose resources they use."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import kubernetes_validate

from inference_pool_schema import pool_findings
from manifests import Manifest, name_of, of_kind
from skips import require_program

ROOT = Path(__file__).parent.parent
# The oldest that README names, one in between, and the newest that the package knows.
VERSIONS = ("1.29", "1.32", "1.37")
CUSTOM = {
    "Certificate", "Issuer", "GRPCRoute", "Gateway", "HTTPRoute", "InferencePool", "PodMonitor", "PrometheusRule",
    "ScaledObject",
}  # fmt: skip


def schema_findings(items: Iterable[Manifest], version: str) -> Iterator[str]:
    """What this version of Kubernetes would refuse, misspelt fields too. A kind it does not know is one of `CUSTOM`."""
    for item in items:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            if item["kind"] not in CUSTOM:
                yield f"{name_of(item)}: Kubernetes {version} knows no {item['apiVersion']} {item['kind']}"
        except kubernetes_validate.ValidationError as error:
            place = "/".join(map(str, error.path))
            yield f"{name_of(item)}: {place}: {error.message}"


def custom_findings(items: Iterable[Manifest]) -> list[str]:
    """What an operator would refuse or drop: wrong kinds, types and values, and misspelt fields."""
    node = require_program("node", how="Node.js 20 or newer")
    if not all((ROOT / "node_modules" / name).is_dir() for name in ("@kubernetes-models", "typescript")):
        require_program("npm-packages-of-package.json", how="npm ci")
    program = ROOT / "tests" / "k8s" / "validate_custom_resources.mjs"
    custom = [item for item in items if item["kind"] in CUSTOM]
    command = [node, str(program)]
    done = subprocess.run(
        command, input=json.dumps(custom), capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    findings: list[str] = json.loads(done.stdout)
    return findings + [finding for item in of_kind(custom, "InferencePool") for finding in pool_findings(item)]
