"""`make dev-certs` prints the Secrets that the component mtls mounts, and the services take them."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import yaml

from manifest_schemas import VERSIONS, schema_findings
from manifests import K8S, Build, of_kind, pod_of, render, workloads
from skips import require_program
from stepwire.tls import TlsFiles


def test_the_secrets_are_those_that_are_mounted_and_their_files_belong_together(tmp_path: Path):
    require_program("openssl", how="apt-get install openssl")
    shutil.copy(K8S.parent / "scripts" / "dev-certs", tmp_path)
    command = [str(tmp_path / "dev-certs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    secrets = of_kind(list(yaml.safe_load_all(done.stdout)), "Secret")
    assert list(schema_findings(secrets, VERSIONS[0])) == []
    volumes = [volume for item in workloads(render(Build("overlays/ha"))) for volume in pod_of(item)["volumes"]]
    mounted = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    assert {secret["metadata"]["name"] for secret in secrets} == mounted
    for secret in secrets:
        for name, text in secret["data"].items():
            (tmp_path / name).write_bytes(base64.b64decode(text))
        TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt").check()
