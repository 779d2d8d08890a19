"""The benchmark of the worker runs, and its requests take the ways that it names."""

from __future__ import annotations

from bench.worker_overhead import SAMPLING, DecodingBatch, measure_sampler, measure_step


def test_steps_and_samplers_are_measured() -> None:
    assert measure_step(3) > 0
    for sampling in SAMPLING.values():
        assert measure_sampler(2, sampling, num_repetitions=1) > 0


def test_greedy_requests_need_no_sampling_batch_and_the_others_do() -> None:
    for name, sampling in SAMPLING.items():
        batch = DecodingBatch(2, sampling).batch
        found = batch.sampling_batch(batch.prepare({("bench", 0): 1, ("bench", 1): 1}))
        assert (found is None) == (name == "greedy")
