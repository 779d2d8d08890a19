"""`make bench`: every benchmark that needs no other engine, one after the other; a table and bench/results/latest.json.

Each runs in a process of its own, so that none inherits threads or memory. One that fails is named, and the exit code
is then 1, like that of a target that is missed with --strict.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench import rows
from bench.engine_flags import ROOT
from bench.machine_noise import Look, Noise, machine
from bench.rows import Row

# In the order of their run; those that need a clean machine most come first.
BENCHMARKS = (
    "model_step",
    "whole_service",
    "prefill_beside_decode",
    "prefix_cache_cost",
    "start_and_memory",
    "step_overhead",
    "scrape_cost",
    "worker_overhead",
    "service_overhead",
    "serving_alone",
    "async_scheduling",
    "quality",
    "growth",
)
RESULTS = ROOT / "bench" / "results" / "latest.json"
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one benchmark said, and what the machine did beside it."""

    rows: list[Row]
    noise: Noise
    seconds: float
    # Empty = it ran to its end.
    failure: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; none = all")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    outcomes = {}
    start = Look.now()
    for name in arguments.names or BENCHMARKS:
        outcome = outcomes[name] = _run(name)
        state = "clean" if outcome.noise.is_clean else "NOT clean"
        sys.stderr.write(f"{name}: {outcome.failure or 'done'} in {outcome.seconds:.0f} s, the machine was {state}\n")
    found = [row for outcome in outcomes.values() for row in outcome.rows]
    write(RESULTS, outcomes, start.until(Look.now()))
    rows.show(found)
    sys.stderr.write(f"{RESULTS.relative_to(ROOT)}\n")
    has_failed = any(outcome.failure for outcome in outcomes.values())
    return int(has_failed or (arguments.strict and any(row.met is False for row in found)))


def write(path: Path, outcomes: dict[str, Outcome], noise: Noise) -> None:
    """All rows with the machine and its noise as one JSON object."""
    content = {
        "machine": machine() | {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        "noise": noise.as_dict() | {"by_benchmark": {name: o.noise.as_dict() for name, o in outcomes.items()}},
        "rows": [row.as_dict() for outcome in outcomes.values() for row in outcome.rows],
        "failures": {name: outcome.failure for name, outcome in outcomes.items() if outcome.failure},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _run(name: str) -> Outcome:
    command = [sys.executable, "-m", f"bench.{name}", "--json"]
    before, started = Look.now(), time.monotonic()
    failure = ""
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
        lines = done.stdout.splitlines()
        if done.returncode:
            failure = f"FAILED with code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        # What it had measured by then counts.
        lines = (error.stdout or b"").decode().splitlines()
        failure = f"not done within {TIMEOUT_S:g} s"
    found = [rows.read(line) for line in lines if line.startswith("{")]
    return Outcome(found, before.until(Look.now()), time.monotonic() - started, failure)


if __name__ == "__main__":
    sys.exit(main())
