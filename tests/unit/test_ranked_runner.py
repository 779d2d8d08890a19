"""Tokens come from the leader: followers take them up when a step needs them, and no earlier."""

from __future__ import annotations

import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.kernels.torch_kernels import TorchKernels
from engine_core.model_executor.loader import load_model
from engine_core.model_executor.model_runner import ModelRunner
from engine_core.model_executor.models.transformers_backend import TransformersBackend
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.parallel.ranked_runner import FollowingRunner, LeadingRunner, make_runner
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from engine_core.scheduler.request import LogprobsParams, SamplingParams
from fakes.one_process_group import OneProcessGroup
from fakes.tiny_models import save_tiny_model, tiny_configs

A, B, C = ("s", 1), ("s", 2), ("s", 3)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("ranked") / "llama", tiny_configs()["llama"])


def runner_of(model_dir, group) -> ModelRunner:
    loaded = load_model(EngineSettings(model="m", device="cpu"), model_dir, lambda _: None)
    runner = make_runner(TransformersBackend("m", loaded), loaded, 4, TorchKernels(), group)
    runner.initialize_kv_cache(40, BLOCK_SIZE)
    return runner


@pytest.fixture
def group():
    # The first of two shards leads; this is the other one.
    return OneProcessGroup(Place(1, 2, 1))


@pytest.fixture
def follower(model_dir, group):
    return runner_of(model_dir, group)


def new(key, **fields) -> NewRequestData:
    first_block = 1 + 8 * key[1]
    sampling = SamplingParams(temperature=0.0)
    return NewRequestData(
        key, [5, 6, 7], [], sampling, 0, (), (list(range(first_block, first_block + 8)),), 0, **fields
    )


def step(runner, scheduled, *, new=(), finished=()):
    total = sum(scheduled.values())
    runner.execute_model(SchedulerOutput(1, list(new), [], scheduled, total, list(finished)))
    return runner.sample_tokens(None)


def test_who_samples(model_dir):
    assert type(runner_of(model_dir, None)) is ModelRunner
    assert type(runner_of(model_dir, OneProcessGroup(Place(0, 2, 1)))) is LeadingRunner
    assert type(runner_of(model_dir, OneProcessGroup(Place(1, 2, 1)))) is FollowingRunner
    assert type(runner_of(model_dir, OneProcessGroup(Place(0, 1, 2)))) is FollowingRunner


def test_the_leader_tells_what_it_samples(model_dir):
    group = OneProcessGroup(Place(0, 2, 1))
    leader = runner_of(model_dir, group)
    output = step(leader, {A: 3, B: 2, C: 3}, new=[new(A), new(B), new(C)])
    [broadcast] = group.broadcasts
    [[of_a], [], [of_c]] = output.sampled_token_ids
    assert broadcast.token_ids.tolist() == [of_a, of_c]
    assert broadcast.token_ids.dtype == torch.int64
    step(leader, {}, finished=[A])
    assert len(group.broadcasts) == 1


def test_a_follower_goes_on_with_what_the_leader_said(follower, group):
    step(follower, {A: 3}, new=[new(A)])
    group.broadcasts[0].told = [123]
    step(follower, {A: 1})
    assert follower._requests.known_token_ids(A) == [5, 6, 7, 123]


def test_a_step_of_other_requests_does_not_wait(follower, group):
    step(follower, {A: 3}, new=[new(A)])
    step(follower, {B: 3}, new=[new(B)])
    assert [broadcast.was_waited_for for broadcast in group.broadcasts] == [False, False]
    group.broadcasts[0].told, group.broadcasts[1].told = [100], [101]
    step(follower, {A: 1})
    assert [broadcast.was_waited_for for broadcast in group.broadcasts] == [True, False, False]
    step(follower, {B: 1})
    assert follower._requests.known_token_ids(B) == [5, 6, 7, 101]


def test_a_chunk_after_a_step_whose_tokens_are_under_way(follower, group):
    step(follower, {A: 3, B: 1}, new=[new(A), new(B)])
    # B's first token counts as computed though A's is not known: its second chunk starts behind it.
    follower.execute_model(SchedulerOutput(2, [], [], {B: 1}, 1, []))
    assert follower._pending.inputs.positions.tolist() == [1]


def test_a_row_is_not_given_away_while_its_token_is_under_way(follower, group):
    step(follower, {A: 3}, new=[new(A)])
    group.broadcasts[0].told = [100]
    step(follower, {B: 3}, new=[new(B)], finished=[A])
    assert group.broadcasts[0].was_waited_for
    group.broadcasts[1].told = [101]
    step(follower, {B: 1})
    assert follower._requests.known_token_ids(B) == [5, 6, 7, 101]


def test_a_follower_makes_no_logits(follower, monkeypatch):
    asked = []
    forward = follower._backend.forward

    def record(input_ids, positions, logits_indices, context):
        asked.append(len(logits_indices))
        return forward(input_ids, positions, logits_indices, context)

    monkeypatch.setattr(follower._backend, "forward", record)
    output = step(follower, {A: 3}, new=[new(A, logprobs=LogprobsParams(num_output=2, num_prompt=2))])
    follower.run_dummy_step([3, 1], BLOCK_SIZE)
    assert asked == [0, 0]
    assert (output.logprobs, output.prompt_logprobs) == ({}, {})
