"""Weights of a serving engine change, and with them its tokens; dropped ones come back from disk. The real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from running_stack import SERVING, Frontend, Service, running_stack
from stepwire.v1 import admin_service_pb2 as pb
from stepwire.v1 import admin_service_pb2_grpc, common_pb2, control_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest, GenerateResponse
from stepwire.v1.model_service_pb2 import GetServerInfoRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
PROMPT = "Once upon a time, in a land of mountains and rivers, there lived a family of bears who loved honey and"
NORM = "model.norm.weight"
# Far from all of them, so that tokens surely differ.
CHANGED = "model.layers.0.self_attn.q_proj.weight"
WEIGHT_BYTES = 538_000_000


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trusted")


@pytest.fixture(scope="module")
def changed(embedded_model_dir: Path, trusted: Path) -> Path:
    """Another checkpoint: weights alone, with one of them negated."""
    tensors = load_file(embedded_model_dir / "model.safetensors")
    tensors[CHANGED] = -tensors[CHANGED]
    (trusted / "changed").mkdir()
    save_file(tensors, trusted / "changed" / "model.safetensors", metadata={"format": "pt"})
    return trusted / "changed"


@pytest.fixture(scope="module")
def engine(embedded_model_dir: Path, trusted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        flags = ("--dtype", "float32", "--kv-cache-memory", "200MiB", "--max-model-len", "1024")
        engine = stack.engine("--trusted-dirs", str(trusted), *flags)
        yield engine, stack.frontend(engine)


@pytest.fixture(scope="module")
def frontend(engine: tuple[Service, Frontend]) -> Frontend:
    engine[1].wait_for_health(SERVING)
    return engine[1]


class Admin:
    """The one engine behind the admin port."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = admin_service_pb2_grpc.AdminServiceStub(channel)

    def result(self, method: str, **args: object):  # type: ignore[no-untyped-def]
        response = self._call(method, args)
        assert not response.errors, response
        (result,) = response.results.values()
        return result

    def reason(self, method: str, **args: object) -> str:
        (error,) = self._call(method, args).errors.values()
        reason: str = error.reason
        return reason

    def _call(self, method: str, args: dict[str, object]):  # type: ignore[no-untyped-def]
        return getattr(self._stub, method)(getattr(pb, f"{method}Request")(args=args), timeout=TIMEOUT_S)

    def pause(self) -> None:
        self.result("Pause", mode=control_pb2.PAUSE_MODE_KEEP)


@pytest.fixture(scope="module")
def admin(frontend: Frontend) -> Iterator[Admin]:
    with grpc.insecure_channel(f"127.0.0.1:{frontend.admin_port}") as channel:
        yield Admin(channel)


def generate(frontend: Frontend) -> GenerateResponse:
    request = GenerateRequest(
        text=PROMPT,
        stop=common_pb2.StopConditions(max_tokens=16, ignore_eos=True),
        output=common_pb2.OutputOptions(token_ids=True),
    )
    request.sampling.temperature = 0
    response: GenerateResponse = frontend.generation.Generate(request, timeout=TIMEOUT_S)
    return response


def ids_of(response: GenerateResponse) -> list[int]:
    return list(response.completions[0].token_ids)


def version_of(frontend: Frontend) -> str:
    (engine,) = frontend.models.GetServerInfo(GetServerInfoRequest()).engines
    version: str = engine.weight_version
    return version


def test_another_checkpoint_gives_other_tokens_and_the_own_one_the_old_ones(frontend, admin, changed: Path) -> None:
    golden = generate(frontend)
    first_version = admin.result("GetWeightVersion").version
    assert version_of(frontend) == first_version
    assert admin.reason("ReloadWeights", path=str(changed)) == "ENGINE_NOT_PAUSED"

    admin.pause()
    reloaded = admin.result("ReloadWeights", path=str(changed))
    assert reloaded.loaded_bytes > WEIGHT_BYTES
    admin.result("Resume")
    other = generate(frontend)
    assert ids_of(other) != ids_of(golden)
    # What was cached for the same prompt belonged to the old weights.
    assert other.usage.cached_prompt_tokens == 0
    assert other.system_fingerprint != golden.system_fingerprint
    assert version_of(frontend) == reloaded.version != first_version

    admin.pause()
    assert admin.result("ReloadWeights").version == first_version
    admin.result("Resume")
    again = generate(frontend)
    assert (ids_of(again), again.system_fingerprint) == (ids_of(golden), golden.system_fingerprint)
    assert again.usage.cached_prompt_tokens == 0


def test_tensors_by_value_and_a_wrong_one(frontend, admin, embedded_model_dir: Path) -> None:
    golden = ids_of(generate(frontend))
    weights = load_file(embedded_model_dir / "model.safetensors")
    data = (-weights[CHANGED]).tobytes()
    tensor = {"name": CHANGED, "dtype": "float32", "shape": weights[CHANGED].shape}
    admin.pause()
    update_id = admin.result("StartWeightUpdate", version="step-1").update_id
    half = len(data) // 2
    # In two calls, the second piece after a refused one.
    pieces = [{**tensor, "data": data[:half]}, {**tensor, "data": data[half:], "offset": half}]
    assert admin.result("UpdateWeights", update_id=update_id, tensors=pieces[:1]).tensors_received == 0
    wrong = {"name": NORM, "dtype": "float32", "shape": [575], "data": bytes(4 * 575)}
    assert admin.reason("UpdateWeights", update_id=update_id, tensors=[wrong]) == "FIELD_INVALID"
    assert admin.reason("FinishWeightUpdate", update_id=update_id) == "WEIGHT_UPDATE_INCOMPLETE"
    assert admin.result("UpdateWeights", update_id=update_id, tensors=pieces[1:]).tensors_received == 1
    assert admin.result("FinishWeightUpdate", update_id=update_id).version == "step-1"
    admin.result("Resume")
    assert version_of(frontend) == "step-1"
    assert ids_of(generate(frontend)) != golden

    admin.pause()
    admin.result("ReloadWeights")
    admin.result("Resume")
    assert ids_of(generate(frontend)) == golden


def test_a_checkpoint_with_a_wrong_shape_leaves_the_tokens(frontend, admin, embedded_model_dir, trusted) -> None:
    golden = ids_of(generate(frontend))
    tensors = load_file(embedded_model_dir / "model.safetensors")
    tensors[NORM] = np.ones(575, np.float32)
    (trusted / "wrong").mkdir()
    save_file(tensors, trusted / "wrong" / "model.safetensors", metadata={"format": "pt"})
    admin.pause()
    assert admin.reason("ReloadWeights", path=str(trusted / "wrong")) == "WEIGHTS_UNUSABLE"
    assert admin.reason("ReloadWeights", path=str(embedded_model_dir)) == "FIELD_INVALID"
    admin.result("Resume")
    assert ids_of(generate(frontend)) == golden


def test_a_sleep_that_drops_all_frees_memory_and_waking_gives_the_same_tokens(engine, frontend, admin) -> None:
    process = psutil.Process(engine[0].process.pid)
    golden = ids_of(generate(frontend))
    awake = process.memory_info().rss
    slept = admin.result("Sleep", level=control_pb2.SLEEP_LEVEL_DISCARD_ALL, pause_mode=control_pb2.PAUSE_MODE_KEEP)
    assert slept.freed_bytes > WEIGHT_BYTES
    assert awake - process.memory_info().rss > 0.9 * WEIGHT_BYTES
    assert not admin.result("WakeUp").still_asleep
    assert ids_of(generate(frontend)) == golden
