"""Staged tensors: everything that is wrong is named with its field before it has an effect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_core import staged_weights
from engine_core.model_executor.checkpoint import read_headers
from engine_core.staged_weights import StagedWeights, require_trusted
from engine_core.weight_operations import TensorPiece
from stepwire.errors import InvalidRequestError, StepwireError

SHAPES = {"embed": (4, 2), "head": (3,)}
EMBED = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def staged() -> StagedWeights:
    return StagedWeights("v2", SHAPES)


def piece(**changes: object) -> TensorPiece:
    fields = {"name": "embed", "dtype": "float32", "shape": (4, 2), "offset": 0, "data": EMBED.tobytes()}
    return TensorPiece(**{**fields, **changes})  # type: ignore[arg-type]


def refusal(staged: StagedWeights, *pieces: TensorPiece) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        staged.add_pieces(pieces)
    return caught.value.message


def test_a_tensor_comes_whole_or_in_pieces(staged: StagedWeights) -> None:
    data = EMBED.tobytes()
    half = np.ones(3, np.float16).tobytes()
    staged.add_pieces([piece(data=data[:10]), piece(name="head", dtype="float16", shape=(3,), data=half)])
    assert staged.num_tensors == 1
    with pytest.raises(StepwireError, match="22 bytes of 'embed' have not come") as caught:
        staged.take()
    assert caught.value.reason == "WEIGHT_UPDATE_INCOMPLETE"
    staged.add_pieces([piece(offset=10, data=data[10:30]), piece(offset=30, data=data[30:])])
    assert {tensor.name: (tensor.dtype, bytes(tensor.data)) for tensor in staged.take()} == {
        "embed": ("float32", data),
        "head": ("float16", half),
    }


def test_offset_0_begins_anew(staged: StagedWeights) -> None:
    staged.add_pieces([piece(data=b"\xff" * 20), piece()])
    assert [bytes(tensor.data) for tensor in staged.take()] == [EMBED.tobytes()]


def test_nothing_is_not_an_update(staged: StagedWeights) -> None:
    with pytest.raises(StepwireError, match="no tensor was handed over"):
        staged.take()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "lm_head"}, r"tensors[1].name: 'lm_head' is no weight of this model"),
        ({"dtype": "int8"}, r"tensors[1].dtype: 'int8' is not float32 or float16 or bfloat16"),
        ({"shape": (2, 4)}, r"tensors[1].shape: 'embed' has [4, 2], not [2, 4]"),
        ({"data": b"x" * 33}, r"tensors[1].data: ends at byte 33, and 'embed' has 32 in float32"),
        ({"offset": 4}, r"tensors[1].offset: 4 is not where 'embed' goes on, which is 0"),
    ],
)
def test_a_wrong_tensor_is_refused_by_field(staged: StagedWeights, wrong: dict, message: str) -> None:
    head = piece(name="head", shape=(3,), data=bytes(12))
    assert refusal(staged, head, piece(**wrong)).startswith(message)


def test_a_piece_that_does_not_go_on_is_refused(staged: StagedWeights) -> None:
    staged.add_pieces([piece(data=bytes(8))])
    # The same again, as after a call whose answer was lost.
    staged.add_pieces([piece(offset=8, data=bytes(8))])
    assert "goes on, which is 16" in refusal(staged, piece(offset=8, data=bytes(8)))
    assert "the first piece was float32" in refusal(staged, piece(offset=16, dtype="float16", data=bytes(8)))
    staged.add_pieces([piece(offset=16, data=bytes(16))])
    assert staged.num_tensors == 1


def test_a_checkpoint_is_read_when_it_is_staged(staged: StagedWeights, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"embed": EMBED}, file)
    staged.add_checkpoint(read_headers([file]))
    file.unlink()
    assert [bytes(tensor.data) for tensor in staged.take()] == [EMBED.tobytes()]


def test_a_checkpoint_with_one_wrong_tensor_stages_nothing(staged: StagedWeights, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"embed": EMBED, "head": np.zeros(4, np.float32)}, file)
    with pytest.raises(InvalidRequestError, match=r"path: model.safetensors: shape: 'head' has \[3\], not \[4\]"):
        staged.add_checkpoint(read_headers([file]))
    assert staged.num_tensors == 0


def test_a_checkpoint_with_other_names_is_told_whose_count(staged: StagedWeights, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"mlp.experts.0.up_proj": EMBED}, file)
    with pytest.raises(InvalidRequestError, match=r"'mlp\.experts\.0\.up_proj' is no weight .* may have fused"):
        staged.add_checkpoint(read_headers([file]))


def test_memory_is_asked_for_before_it_is_taken(staged: StagedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_weights, "available_bytes", lambda: 31)
    assert refusal(staged, piece()).startswith("tensors[0].shape: needs ")
    staged.add_pieces([piece(name="head", shape=(3,), data=bytes(12))])


def test_only_paths_below_trusted_directories(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for directory in (inside / "model", outside):
        directory.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    require_trusted(inside / "model", [outside, inside])
    for path in (outside, inside / "link", inside / ".." / "outside", tmp_path / "inside-too"):
        with pytest.raises(InvalidRequestError, match=r"^path: .* --trusted-dirs"):
            require_trusted(path, [inside])
    with pytest.raises(InvalidRequestError):
        require_trusted(inside, [])
