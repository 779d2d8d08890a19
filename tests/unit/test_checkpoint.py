"""Checkpoint files: what is in them, and a version that depends on the content alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_core.model_executor.checkpoint import (
    CheckpointError,
    checkpoint_files,
    content_version,
    num_parameters,
    read_headers,
    read_tensor,
)

TENSORS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.arange(4, dtype=np.float16),
    "empty": np.zeros((0, 3), np.float32),
}


def save(directory: Path, tensors: dict[str, np.ndarray] = TENSORS) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"written": str(directory)})
    return directory


def save_shards(directory: Path) -> Path:
    directory.mkdir()
    files = {name: f"part-{name}.safetensors" for name in TENSORS}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return directory


@pytest.mark.parametrize("writer", [save, save_shards])
def test_tensors_are_found_and_read(tmp_path: Path, writer) -> None:
    tensors = read_headers(checkpoint_files(writer(tmp_path / "model")))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "a": ("float16", (4,)),
        "b": ("float32", (2, 3)),
        "empty": ("float32", (0, 3)),
    }
    assert num_parameters(tensors) == 10
    assert {name: bytes(read_tensor(tensor)) for name, tensor in tensors.items()} == {
        name: values.tobytes() for name, values in TENSORS.items()
    }


def test_the_version_is_that_of_the_content(tmp_path: Path) -> None:
    version = content_version(save(tmp_path / "one"))
    assert version == content_version(save_shards(tmp_path / "shards"))
    last = TENSORS["b"].copy()
    last[-1, -1] += 1
    for index, changed in enumerate(
        [{"b": last}, {"b": TENSORS["b"].reshape(3, 2)}, {"b": TENSORS["b"].view(np.int32)}, {"c": TENSORS["a"]}]
    ):
        assert content_version(save(tmp_path / f"changed-{index}", TENSORS | changed)) != version


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 40, b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b"\x10" + bytes(7) + b'{"a": {"dtype":1', bytes(8)],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^model\.safetensors can not be used"):
        content_version(tmp_path)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="lies outside of the file"):
        read_headers([file])


@pytest.mark.parametrize(
    ("shape", "message"), [([1, 3], "not 12"), ([6, 2], "not 48"), ([], "not 4"), ([2.0, 3], "'float' object")]
)
def test_a_shape_that_does_not_fit_its_bytes_is_refused(tmp_path: Path, shape: list[float], message: str) -> None:
    header = json.dumps({"b": {"dtype": "F32", "shape": shape, "data_offsets": [0, 24]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(CheckpointError, match=rf"^model\.safetensors can not be used .*{message}"):
        read_headers([file])


def test_a_whole_file_counts_and_not_the_index_beside_it(tmp_path: Path) -> None:
    # As transformers loads it.
    directory = save(tmp_path / "model")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    assert checkpoint_files(directory) == [directory / "model.safetensors"]


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_can_not_be_used_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json can not be used"):
        checkpoint_files(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^model\.safetensors"):
        content_version(tmp_path)
