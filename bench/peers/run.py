"""`make bench-peers`: stepwire and other engines in turn on the same machine; a table and bench/results/peers.json.

Within a round everybody answers the same task, one after the other, and each round begins with another one. A row is
the median of the rounds' ratios, with their range beside it: one that holds 1 has no winner. Rounds in which the
machine was not clean count only when there is no other, and the row says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from bench import rows
from bench.engine_flags import ROOT
from bench.machine_noise import Look, Noise, machine
from bench.peers import tasks
from bench.peers.contestants import PROMPTS, Contestant, Figures
from bench.peers.matches import Match, Session, sessions
from bench.peers.places import NotInstalledError
from bench.rows import Row
from launcher.errors import LaunchError

RESULTS = ROOT / "bench" / "results" / "peers.json"
# On the way from one to the next the machine comes to rest: vLLM's workers look for work for a second before they wait.
PAUSE_S = 2.0
# What ends a session and no other one: something is not there, does not start, dies, or fails a request.
FAILURES = (NotInstalledError, LaunchError, subprocess.SubprocessError, RuntimeError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant's answer to one task in one round."""

    name: str
    task: tasks.Task
    number: int
    figures: list[Figures]
    noise: Noise


def main() -> int:
    every = sessions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SESSION", help=f"of {', '.join(every)}; none = all")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, tasks.MAX_ROUNDS + 1), metavar="N")
    parser.add_argument("--tiny", action="store_true", help="a few tokens only: is everything installed?")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(every)
    if unknown:
        parser.error(f"no session {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    tasks.write_prompts(PROMPTS)
    found: list[Row] = []
    runs: list[Run] = []
    failures: dict[str, str] = {}
    start = Look.now()
    for name in arguments.names or every:
        session = every[name].tiny() if arguments.tiny else every[name]
        first = len(runs)
        try:
            # What came before a failure stays in the list.
            runs.extend(play(session, arguments.rounds))
        except FAILURES as error:
            failures[name] = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"{name}: {failures[name]}\n")
        else:
            found += compare(session.matches, runs[first:])
        # What was measured is kept, whatever becomes of the sessions after it.
        _write(found, runs, failures, start.until(Look.now()))
    rows.show(found)
    return int(bool(failures))


def play(session: Session, num_rounds: int) -> Iterator[Run]:
    """Every distinct task of the session in every round, by everybody who takes part in it."""
    with ExitStack() as stack:
        up = {name: stack.enter_context(start()) for name, start in session.contestants.items()}
        for number in range(num_rounds):
            asked: dict[tasks.Task, list[str]] = {}
            for match in session.matches:
                names = asked.setdefault(match.in_round(number), [])
                names += [name for name in (match.mine, match.peer) if name not in names]
            for task, names in asked.items():
                # The other way round in every other round.
                for name in names if number % 2 == 0 else reversed(names):
                    yield _measure(name, up[name], task, number)


def _measure(name: str, contestant: Contestant, task: tasks.Task, number: int) -> Run:
    time.sleep(PAUSE_S)
    before = Look.now()
    figures = contestant.measure(task)
    run = Run(name, task, number, figures, before.until(Look.now()))
    shown = ", ".join(f"{figure['tok_s']:.1f} tok/s" for figure in figures)
    state = "" if run.noise.is_clean else " (not clean)"
    sys.stderr.write(f"round {number} {task.kind} x {task.count}: {name} {shown}{state}\n")
    return run


def compare(matches: Sequence[Match], runs: Sequence[Run]) -> Iterator[Row]:
    """The ratio of each match, then what both sides made."""
    by_place = {(run.name, run.task): run for run in runs}
    numbers = sorted({run.number for run in runs})
    for match in matches:
        pairs = [
            (by_place[match.mine, match.in_round(number)], by_place[match.peer, match.in_round(number)])
            for number in numbers
        ]
        clean = [(mine, peer) for mine, peer in pairs if mine.noise.is_clean and peer.noise.is_clean]
        values = [(_value(match, mine), _value(match, peer)) for mine, peer in clean or pairs]
        ratios = [mine / peer for mine, peer in values]
        what = f"{match.title}: {match.mine} over {match.peer}, {match.metric}"
        span = f"{match.case} [{min(ratios):.2f}..{max(ratios):.2f}]{'' if clean else ' NOT CLEAN'}"
        yield Row(what, span, statistics.median(ratios), match.target, match.better)
        for name, index in ((match.mine, 0), (match.peer, 1)):
            median = statistics.median(value[index] for value in values)
            yield Row(f"{match.title}: {name}, {match.metric}", match.case, median, better=match.better)


def _value(match: Match, run: Run) -> float:
    return run.figures[match.repetition][match.metric]


def _write(found: Sequence[Row], runs: Sequence[Run], failures: dict[str, str], noise: Noise) -> None:
    content = {
        "machine": machine() | {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        "noise": noise.as_dict(),
        "rows": [row.as_dict() for row in found],
        "runs": [asdict(run) | {"noise": run.noise.as_dict()} for run in runs],
        "failures": failures,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
