"""A directory of the cache appears whole, once, and for every process."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from engine_core.model_executor.model_cache import make_once
from engine_core.model_executor.startup_error import StartupError


def ignore(message: str) -> None:
    """Progress that nobody reads."""


def write_file(staging: Path) -> None:
    (staging / "file").write_text("content")


def test_made_once_and_readable_by_others(tmp_path):
    calls = []

    def fill(staging: Path) -> None:
        calls.append(staging)
        write_file(staging)
        (staging / "file").chmod(0o600)

    for _ in range(2):
        assert make_once(tmp_path / "new" / "model", fill, ignore) == tmp_path / "new" / "model"
    assert len(calls) == 1
    assert stat.S_IMODE((tmp_path / "new" / "model").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "new" / "model" / "file").stat().st_mode) == 0o644


def test_a_failure_leaves_nothing_and_the_next_try_works(tmp_path):
    def fail(staging: Path) -> None:
        write_file(staging)
        raise StartupError("no")

    with pytest.raises(StartupError, match="no"):
        make_once(tmp_path / "model", fail, ignore)
    assert [path.name for path in tmp_path.iterdir()] in ([".lock"], [])
    assert (make_once(tmp_path / "model", write_file, ignore) / "file").is_file()


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".staging-dead").mkdir()
    (tmp_path / ".staging-dead" / "half").write_text("")
    make_once(tmp_path / "model", write_file, ignore)
    assert not (tmp_path / ".staging-dead").exists()


def test_a_place_that_can_not_be_written_names_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="--models-dir"):
        make_once(tmp_path / "file" / "model", write_file, ignore)


def test_a_second_process_waits_for_the_first_and_uses_its_work(tmp_path):
    # Locks of one file exclude each other inside a process as they do between processes.
    target, waiting, filled = tmp_path / "model", threading.Event(), []
    first = FileLock(tmp_path / ".lock")
    first.acquire()
    second = threading.Thread(target=make_once, args=(target, filled.append, lambda _: waiting.set()))
    second.start()
    assert waiting.wait(timeout=30)
    target.mkdir()
    first.release()
    second.join(timeout=30)
    assert not second.is_alive()
    assert filled == []


def test_the_lock_is_free_afterwards(tmp_path):
    make_once(tmp_path / "model", write_file, ignore)
    FileLock(tmp_path / ".lock").acquire(timeout=0).lock.release()
