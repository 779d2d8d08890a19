"""Comparisons with other engines, without other engines: who answers what in which order, and what is made of it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bench.machine_noise import Noise
from bench.peers import contestants, matches, places, run, tasks
from bench.peers.matches import Match, Session
from bench.peers.places import NotInstalledError
from bench.peers.tasks import Task
from bench.rows import Row
from launcher.errors import LaunchError

CLEAN, NOISY = Noise(0.0, 0.0), Noise(50.0, 0.0)
SHORT = Match("a", "b", "W1", "c=2", Task("short", 0, 2, 8), 1.5)


class Scripted:
    """Answers each task with the next of its speeds; notes what it was asked."""

    def __init__(self, name: str, speeds: list[float], asked: list[tuple[str, str]]) -> None:
        self._name, self._speeds, self._asked = name, iter(speeds), asked

    def measure(self, task: Task) -> list[contestants.Figures]:
        self._asked.append((self._name, task.kind))
        return [{"tok_s": next(self._speeds), "wall_s": 1.0} for _ in range(task.repetitions)]


def session_of(asked: list[tuple[str, str]], own: list[Match], **speeds: list[float]) -> Session:
    def starter(name: str):
        @contextmanager
        def start():
            yield Scripted(name, speeds[name], asked)

        return start

    return Session({name: starter(name) for name in speeds}, own)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(run, "PAUSE_S", 0.0)


def test_everybody_answers_new_prompts_each_round_and_takes_turns_in_beginning():
    asked: list[tuple[str, str]] = []
    runs = list(run.play(session_of(asked, [SHORT], a=[30.0, 40.0], b=[10.0, 20.0]), 2))
    assert asked == [("a", "short-0"), ("b", "short-0"), ("b", "short-1"), ("a", "short-1")]
    assert [each.number for each in runs] == [0, 0, 1, 1]


def test_a_task_of_several_matches_is_answered_once_by_each_who_takes_part():
    asked: list[tuple[str, str]] = []
    own = [SHORT, Match("c", "b", "W1", "c=2", SHORT.task, None)]
    list(run.play(session_of(asked, own, a=[1.0], b=[1.0], c=[1.0]), 1))
    assert asked == [("a", "short-0"), ("b", "short-0"), ("c", "short-0")]


def runs_of(noises: list[Noise], mine: list[float], peer: list[float]) -> list[run.Run]:
    return [
        run.Run(name, SHORT.in_round(number), number, [{"tok_s": speeds[number]}], noise)
        for number, noise in enumerate(noises)
        for name, speeds in (("a", mine), ("b", peer))
    ]


def test_a_row_is_the_median_of_the_rounds_ratios_with_their_range():
    rows = list(run.compare([SHORT], runs_of([CLEAN] * 3, [20.0, 60.0, 30.0], [10.0, 20.0, 10.0])))
    assert rows == [
        Row("W1: a over b, tok_s", "c=2 [2.00..3.00]", 3.0, 1.5, "higher"),
        Row("W1: a, tok_s", "c=2", 30.0, None, "higher"),
        Row("W1: b, tok_s", "c=2", 10.0, None, "higher"),
    ]


def test_rounds_that_were_not_clean_count_only_when_there_is_no_other():
    speeds = ([20.0, 60.0], [10.0, 20.0])
    [ratio, *_] = run.compare([SHORT], runs_of([NOISY, CLEAN], *speeds))
    assert (ratio.case, ratio.value) == ("c=2 [3.00..3.00]", 3.0)
    [ratio, *_] = run.compare([SHORT], runs_of([NOISY, NOISY], *speeds))
    assert (ratio.case, ratio.value) == ("c=2 [2.00..3.00] NOT CLEAN", 2.5)


class Failing(Scripted):
    """Answers once, and fails then."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("b", [10.0], [])
        self._error = error

    def measure(self, task: Task) -> list[contestants.Figures]:
        if not self._asked:
            return super().measure(task)
        raise self._error


def failing_session(error: BaseException, *, at_start: bool = False) -> Session:
    @contextmanager
    def start():
        if at_start:
            raise error
        yield Failing(error)

    session = session_of([], [SHORT], a=[20.0] * 3)
    return Session({**session.contestants, "b": start}, session.matches)


def run_main(monkeypatch, tmp_path: Path, sessions: dict[str, Session]) -> dict[str, object]:
    monkeypatch.setattr(run, "sessions", lambda: sessions)
    monkeypatch.setattr(run, "PROMPTS", tmp_path / "prompts.json")
    monkeypatch.setattr(run, "RESULTS", tmp_path / "peers.json")
    monkeypatch.setattr(sys, "argv", ["run"])
    with suppress(KeyboardInterrupt):
        assert run.main() == 1
    return json.loads((tmp_path / "peers.json").read_text())


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, "bench"),
        LaunchError("engine core has ended"),
        RuntimeError("a driver has ended"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_contestant_that_fails_ends_its_session_alone(monkeypatch, tmp_path, error, at_start):
    good = [session_of([], [SHORT], a=[20.0] * 3, b=[10.0] * 3) for _ in range(2)]
    sessions = {"first": good[0], "broken": failing_session(error, at_start=at_start), "last": good[1]}
    content = run_main(monkeypatch, tmp_path, sessions)
    assert content["failures"] == {"broken": f"{type(error).__name__}: {error}"}
    assert [row["value"] for row in content["rows"]] == [2.0, 20.0, 10.0] * 2
    # Of the broken session the answers that came are kept: both of round 0, none of round 1, which b begins.
    assert len(content["runs"]) == 12 + (0 if at_start else 2)


def test_what_was_measured_is_written_before_the_next_session_begins(monkeypatch, tmp_path):
    sessions = {
        "first": session_of([], [SHORT], a=[20.0] * 3, b=[10.0] * 3),
        "broken": failing_session(RuntimeError("boom")),
        "interrupted": failing_session(KeyboardInterrupt()),
    }
    content = run_main(monkeypatch, tmp_path, sessions)
    assert len(content["rows"]) == 3
    assert content["failures"] == {"broken": "RuntimeError: boom"}


def test_a_model_that_was_made_by_half_is_made_again(monkeypatch, tmp_path):
    program = tmp_path / "llama-quantize"
    program.write_text('#!/bin/sh\necho half > "$3"\nexit 1\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    source = tmp_path / "source.gguf"
    source.touch()
    monkeypatch.setenv(places.LLAMA_BIN, str(tmp_path))
    monkeypatch.setenv(places.GGUF, str(source))
    monkeypatch.setattr(places.engine_flags, "BUILD", tmp_path / "build")
    with pytest.raises(subprocess.CalledProcessError):
        places.bf16_gguf()
    program.write_text('#!/bin/sh\necho whole > "$3"\n')
    assert places.bf16_gguf().read_text() == "whole\n"


def test_every_task_has_its_prompts_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "model_dir", lambda: tmp_path)
    file = tmp_path / "prompts.json"
    tasks.write_prompts(file)
    sent: dict[str, set[tuple[int, ...]]] = {}
    for name, session in matches.sessions().items():
        for number in (0, tasks.MAX_ROUNDS - 1):
            for task in {match.in_round(number) for match in session.matches}:
                prompts = [tuple(prompt) for prompt in task.prompts(file)]
                assert len(prompts) == task.count
                # No task of a session sends what another one has sent.
                assert not sent.setdefault(name, set()) & set(prompts)
                sent[name] |= set(prompts)


def test_a_tiny_run_asks_for_each_kind_of_figure_once():
    session = Session({}, [SHORT, Match("a", "b", "W1", "c=8", Task("short", 2, 8, 128), 1.0)])
    [match] = session.tiny().matches
    assert (match.task, match.target) == (Task("short", 0, 1, 2), None)


DRIVER = """
import sys
from pathlib import Path
from bench.peers.driver import Answers, serve

def generate(prompts, max_tokens):
    print("the engine's own words")
    return Answers(len(prompts) * max_tokens, [0.5] * len(prompts), [])

serve(generate, Path(sys.argv[1]))
"""


def test_a_driver_answers_tasks_between_the_words_of_its_engine(tmp_path):
    prompts = tmp_path / "prompts.json"
    tasks.write_prompts(prompts)
    command = [sys.executable, "-c", DRIVER, str(prompts)]
    with contestants._driven("test-driver", command, None) as contestant:
        first, second = contestant.measure(Task("short-0", 0, 3, 4, repetitions=2))
    assert first["output_tokens"] == second["output_tokens"] == 12
    assert first["tok_s"] > 0
    assert first["ttft_mean"] == 500
    assert first["itl_mean"] is None


def test_a_driver_that_dies_is_said():
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    with (
        pytest.raises(RuntimeError, match="has ended"),
        contestants._driven("test-driver", command, None),
    ):
        pass


def test_drivers_need_nothing_but_the_standard_library():
    code = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; import bench.peers.driver"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_llama_counts_the_prompts_time_too(tmp_path, monkeypatch):
    row = {"pl": 8, "tg": 128, "t": 4.0, "t_pp": 0.8, "t_tg": 3.2}
    program = tmp_path / "llama-batched-bench"
    program.write_text(f"#!/bin/sh\necho main: words\necho '{json.dumps(row)}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(places.LLAMA_BIN, str(tmp_path))
    monkeypatch.setattr(places, "bf16_gguf", lambda: tmp_path / "model.gguf")
    [figures] = contestants.LlamaBatched().measure(Task("short-0", 0, 8, 128))
    assert figures == {"tok_s": 256.0, "wall_s": 4.0, "ttft_mean": 800.0, "itl_mean": 25.0}


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(places.VLLM_VENV, raising=False)
    with pytest.raises(NotInstalledError, match=places.VLLM_VENV):
        places.vllm_python()
    monkeypatch.setenv(places.VLLM_VENV, str(tmp_path))
    with pytest.raises(NotInstalledError, match="bin/python is not there"):
        places.vllm_python()
