"""Directories under --models-dir that are made once and then only read. Used by the thread that starts the engine.

A directory appears whole or not at all: it is filled under a temporary name and renamed. A file lock keeps two
processes from doing the same long work twice; it dies with its process, so a killed conversion blocks nobody.
Never touches a directory that is already there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from engine_core.model_executor.startup_error import StartupError

Progress = Callable[[str], None]

_STAGING_PREFIX = ".staging-"


def make_once(target: Path, fill: Callable[[Path], None], progress: Progress) -> Path:
    """`target`, made by `fill(empty directory)` unless it exists. Safe against other processes and against a kill."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent, progress):
            # The holder of the lock before us may have made it.
            if not target.is_dir():
                _fill_and_rename(target, fill)
    except OSError as error:
        raise StartupError(f"--models-dir {target.parent}: {error.strerror or error}") from error
    return target


def _locked(directory: Path, progress: Progress) -> AcquireReturnProxy[FileLock]:
    lock = FileLock(directory / ".lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that prepares a model")
        return lock.acquire()


def _fill_and_rename(target: Path, fill: Callable[[Path], None]) -> None:
    # We hold the lock, so whatever is staged here was left by a process that is gone.
    for leftover in target.parent.glob(f"{_STAGING_PREFIX}*"):
        shutil.rmtree(leftover)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=target.parent))
    try:
        fill(staging)
        # Temporary names and some writers make private files; a service under another user must read the model.
        staging.chmod(0o755)
        for file in staging.iterdir():
            file.chmod(0o644)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
