"""Operations on a serving engine with the real model: streams go on with the same tokens as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from running_stack import SERVING, Frontend, Service, running_stack, wait_until_zero
from stepwire.v1 import admin_service_pb2 as pb
from stepwire.v1 import admin_service_pb2_grpc, common_pb2, control_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
PROMPT = "Once upon a time, in a land of mountains and rivers, there lived a family of bears who loved honey and"
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def stack(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Frontend]]:
    profiles = tmp_path_factory.mktemp("profiles")
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        engine = stack.engine("--profile-dir", str(profiles), "--dtype", "float32")
        frontend = stack.frontend(engine)
        frontend.wait_for_health(SERVING)
        yield engine, frontend


@pytest.fixture(scope="module")
def frontend(stack: tuple[Service, Frontend]) -> Frontend:
    return stack[1]


@pytest.fixture(scope="module")
def admin(frontend: Frontend) -> Iterator[admin_service_pb2_grpc.AdminServiceStub]:
    with grpc.insecure_channel(f"127.0.0.1:{frontend.admin_port}") as channel:
        yield admin_service_pb2_grpc.AdminServiceStub(channel)


def only(response):  # type: ignore[no-untyped-def]
    """The result of the one engine."""
    assert not response.errors, response
    (result,) = response.results.values()
    return result


def request(max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        text=PROMPT,
        sampling=common_pb2.SamplingParams(temperature=0.9, seed=11),
        stop=common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=common_pb2.OutputOptions(token_ids=True),
    )


@pytest.fixture(scope="module")
def whole(frontend: Frontend) -> list[int]:
    """The first tokens of an answer that nothing disturbs."""
    return list(frontend.generation.Generate(request(NUM_TOKENS), timeout=TIMEOUT_S).completions[0].token_ids)


class Answer:
    """A stream that has delivered something, and that is not over before it is left, however late the test is."""

    def __init__(self, engine: Service, frontend: Frontend) -> None:
        self._engine = engine
        self._call = frontend.generation.GenerateStream(request(4000), timeout=TIMEOUT_S)
        self._token_ids: list[int] = []
        self._read(1)

    def first_tokens(self) -> list[int]:
        """As many as `whole` has; then it is left, and the engine without a request."""
        self._read(NUM_TOKENS)
        self._call.cancel()
        wait_until_zero(self._engine, "stepwire_engine_core_requests_running")
        return self._token_ids[:NUM_TOKENS]

    def _read(self, num_tokens: int) -> None:
        while len(self._token_ids) < num_tokens:
            self._token_ids += next(self._call).delta.token_ids


@pytest.fixture
def answer(stack: tuple[Service, Frontend], whole: list[int]) -> Answer:
    return Answer(*stack)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_stream_frozen_by_a_pause_goes_on_with_the_same_tokens(admin, whole, answer, clear_cache: bool) -> None:
    args = control_pb2.PauseArgs(mode=control_pb2.PAUSE_MODE_KEEP, clear_cache=clear_cache)
    assert only(admin.Pause(pb.PauseRequest(args=args), timeout=TIMEOUT_S)).held_requests == 1
    before = only(admin.DumpState(pb.DumpStateRequest(args={"include_requests": True})))
    assert before.state == common_pb2.ENGINE_STATE_PAUSED
    assert not before.invariant_violations
    # The step counter stands still while the stream is open.
    assert only(admin.DumpState(pb.DumpStateRequest())).step == before.step
    assert only(admin.Resume(pb.ResumeRequest())).resumed
    assert answer.first_tokens() == whole


def test_a_stream_survives_a_sleep_that_drops_its_kv(admin, whole, answer) -> None:
    args = control_pb2.SleepArgs(level=control_pb2.SLEEP_LEVEL_OFFLOAD_WEIGHTS, pause_mode=control_pb2.PAUSE_MODE_KEEP)
    assert only(admin.Sleep(pb.SleepRequest(args=args), timeout=TIMEOUT_S)).freed_bytes > 0
    assert only(admin.IsSleeping(pb.IsSleepingRequest())).sleeping
    assert not only(admin.WakeUp(pb.WakeUpRequest(), timeout=TIMEOUT_S)).still_asleep
    assert answer.first_tokens() == whole


def test_reset_prefix_cache_makes_the_next_prompt_compute_everything(frontend, admin) -> None:
    for _ in range(2):
        usage = frontend.generation.Generate(request(2), timeout=TIMEOUT_S).usage
    assert usage.cached_prompt_tokens > 0
    # The frontend answers a moment before the engine has freed the last block.
    give_up = time.monotonic() + TIMEOUT_S
    while not (answer := only(admin.ResetPrefixCache(pb.ResetPrefixCacheRequest()))).reset:
        assert time.monotonic() < give_up, answer
    assert frontend.generation.Generate(request(2), timeout=TIMEOUT_S).usage.cached_prompt_tokens == 0


def test_reset_with_running_requests_recomputes_them(admin, whole, answer) -> None:
    args = control_pb2.ResetPrefixCacheArgs(reset_running_requests=True)
    assert only(admin.ResetPrefixCache(pb.ResetPrefixCacheRequest(args=args))).reset
    assert answer.first_tokens() == whole


def test_a_profile_of_some_steps_is_written_by_itself(frontend, admin) -> None:
    args = control_pb2.StartProfileArgs(num_steps=2, prefix="steps")
    directory = Path(only(admin.StartProfile(pb.StartProfileRequest(args=args))).output_dir)
    frontend.generation.Generate(request(8), timeout=TIMEOUT_S)
    assert [path.name.startswith("steps-") for path in directory.iterdir()] == [True]
    # It has ended, so a new one may begin.
    only(admin.StartProfile(pb.StartProfileRequest()))
    assert len(only(admin.StopProfile(pb.StopProfileRequest(), timeout=TIMEOUT_S)).files) == 1


def test_health_and_facts(frontend, admin) -> None:
    assert only(admin.CheckHealth(pb.CheckHealthRequest())).healthy
    metadata = only(admin.GetKvCacheMetadata(pb.GetKvCacheMetadataRequest()))
    assert metadata.groups[0].num_layers == 30
    assert metadata.num_blocks > 0
