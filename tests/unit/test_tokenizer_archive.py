"""The tokenizer archive: same files, same bytes; nothing unpacked that does not belong."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from stepwire import tokenizer_archive


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tokenizer.json").write_text('{"a": 1}')
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_equal_files_give_equal_hashes_whatever_their_dates(model_dir: Path, tmp_path: Path):
    first = tokenizer_archive.build(model_dir)
    os.utime(model_dir / "tokenizer.json", (1, 1))
    assert tokenizer_archive.build(model_dir) == first
    (model_dir / "tokenizer.json").write_text('{"a": 2}')
    assert tokenizer_archive.sha256(tokenizer_archive.build(model_dir)) != tokenizer_archive.sha256(first)


def test_round_trip_leaves_weights_behind(model_dir: Path, tmp_path: Path):
    data = tokenizer_archive.build(model_dir)
    target = tokenizer_archive.unpack(data, tmp_path / "cache")
    assert target.name == tokenizer_archive.sha256(data)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "tokenizer.json"]
    assert tokenizer_archive.build(target) == data
    # A second time it is there already, and nothing half-made lies beside it.
    assert tokenizer_archive.unpack(data, tmp_path / "cache") == target
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [target.name]


def test_directory_without_tokenizer_has_no_archive(tmp_path: Path):
    assert tokenizer_archive.build(tmp_path) == b""
    assert tokenizer_archive.sha256(b"") == ""


@pytest.mark.parametrize("name", ["evil.py", "../tokenizer.json", "/etc/passwd"])
def test_files_that_do_not_belong_are_refused(tmp_path: Path, name: str):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tokenizer.json", "{}")
        archive.writestr(name, "x")
    with pytest.raises(ValueError, match="unexpected files"):
        tokenizer_archive.unpack(buffer.getvalue(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer_archive, "MAX_UNPACKED_BYTES", 1000)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokenizer.json", "0" * 1001)
    with pytest.raises(ValueError):
        tokenizer_archive.unpack(buffer.getvalue(), tmp_path / "cache")
