"""`--model` in all its forms, and one clear sentence for each way it can be wrong."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine_core.config import EngineSettings
from engine_core.model_executor.model_source import ResolvedModel, resolve_model
from engine_core.model_executor.startup_error import StartupError


def resolve(model, tmp_path, **settings) -> ResolvedModel:
    return resolve_model(EngineSettings(model=str(model), models_dir=tmp_path / "cache", **settings), lambda _: None)


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def test_local_directory(model_dir, tmp_path):
    assert resolve(model_dir, tmp_path) == ResolvedModel(model_dir, "my-model", "")
    assert resolve(f"{model_dir}/", tmp_path).name == "my-model"


def test_served_name_replaces_the_derived_one(model_dir, tmp_path):
    assert resolve(model_dir, tmp_path, served_model_name="served").name == "served"


@pytest.mark.parametrize("model", ["/no/such/dir", "./missing", "a/b/c", "what is this", ""])
def test_neither_path_nor_hub_id(model, tmp_path):
    with pytest.raises(StartupError, match=f"^--model {model}: no such directory"):
        resolve(model, tmp_path)


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "no config.json"), ("model.safetensors", "no .safetensors")]
)
def test_directory_that_is_no_model(model_dir, tmp_path, missing, message):
    (model_dir / missing).unlink()
    with pytest.raises(StartupError, match=f"--model .*{message}"):
        resolve(model_dir, tmp_path)


def test_missing_gguf(tmp_path):
    with pytest.raises(StartupError, match=r"--model .*x\.gguf: no such file"):
        resolve(tmp_path / "x.gguf", tmp_path)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(StartupError, match=r"--model .*x\.gguf: can not be converted"):
        resolve(tmp_path / "x.gguf", tmp_path)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_hub_id_is_fetched_at_its_revision(model_dir, tmp_path, monkeypatch):
    snapshot = model_dir.rename(tmp_path / "0123abcd")
    calls = []

    def snapshot_download(repo_id, *, revision, **_):
        calls.append((repo_id, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name", tmp_path, revision="main") == ResolvedModel(snapshot, "org/name", "0123abcd")
    assert resolve("org/name", tmp_path).revision == "0123abcd"
    assert calls == [("org/name", "main"), ("org/name", None)]


def test_hub_out_of_reach(tmp_path, monkeypatch):
    def snapshot_download(*_, **__):
        raise LocalEntryNotFoundError("no connection\nand many more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(StartupError, match=r"--model org/name: .* can not be fetched from the hub \(no connection\)$"):
        resolve("org/name", tmp_path)
