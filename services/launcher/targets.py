"""Where Prometheus finds the metrics of running services: a file of targets as long as they run (`file_sd`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# deploy/prometheus/prometheus.yaml looks for files here.
DIRECTORY = Path("build/logs/targets")
FRONTEND_JOB, ENGINE_JOB = "stepwire-frontend", "stepwire-engine-core"


@contextmanager
def announced(path: Path, frontends: Sequence[str], engines: Sequence[str]) -> Iterator[None]:
    """For the body: these metrics ports (`host:port`) are targets. Afterwards they are none, and alert nobody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = [
        {"targets": list(addresses), "labels": {"job": job}}
        for job, addresses in ((FRONTEND_JOB, frontends), (ENGINE_JOB, engines))
        if addresses
    ]
    # Renamed into place: Prometheus reads it as soon as it changes.
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(groups), encoding="utf-8")
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
