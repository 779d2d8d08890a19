"""What `make bench` reports with: rows, targets, noise, and that nothing that fails is hidden."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from bench import growth, loaded_model, machine_noise, run, whole_service
from bench.machine_noise import Look, Noise
from bench.packed_floor import _shapes
from bench.rows import Row, read
from bench.service_overhead import ServiceCost
from engine_core.scheduler.output import ModelRunnerOutput


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (Row("n", "c", 1.0, 1.0), True),
        (Row("n", "c", 1.1, 1.0), False),
        (Row("n", "c", 1.1, 1.0, "higher"), True),
        (Row("n", "c", 0.9, 1.0, "higher"), False),
        (Row("n", "c", 0.9), None),
    ],
)
def test_a_row_meets_its_target_or_has_none(row: Row, met: bool | None):
    assert row.met is met
    assert row.as_dict()["met"] is met
    assert read(json.dumps(asdict(row))) == row


def test_noise_is_the_time_of_others_and_of_the_hypervisor():
    before = Look(at=100.0, busy=50.0, own=10.0, steal=1.0)
    assert before.until(Look(at=110.0, busy=62.0, own=21.9, steal=1.1)) == Noise(1.0, 1.0)
    assert before.until(Look(at=110.0, busy=62.0, own=21.9, steal=1.1)).is_clean
    assert not before.until(Look(at=110.0, busy=62.0, own=21.0, steal=1.0)).is_clean
    assert not before.until(Look(at=110.0, busy=62.0, own=22.0, steal=1.2)).is_clean


def test_time_of_children_that_have_ended_is_our_own():
    before = machine_noise._own_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    assert machine_noise._own_seconds() - before > 0.1


def benchmark(monkeypatch, tmp_path, body: str) -> run.Outcome:
    package = tmp_path / "bench"
    package.mkdir()
    (package / "scripted.py").write_text(f"import sys\n{body}")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    return run._run("scripted")


ROW = '{"name": "n", "case": "c", "value": 1.5, "target": 2.0, "better": "lower"}'


def test_a_benchmark_that_fails_is_named_and_keeps_what_it_has_measured(monkeypatch, tmp_path):
    outcome = benchmark(monkeypatch, tmp_path, f"print({ROW!r})\nsys.exit(3)")
    assert outcome.rows == [Row("n", "c", 1.5, 2.0)]
    assert outcome.failure == "FAILED with code 3"


def test_a_benchmark_that_does_not_end_is_ended_and_named(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "TIMEOUT_S", 5.0)
    outcome = benchmark(
        monkeypatch, tmp_path, f"print({ROW!r}, flush=True)\nimport threading\nthreading.Event().wait()"
    )
    assert outcome.rows == [Row("n", "c", 1.5, 2.0)]
    assert outcome.failure == "not done within 5 s"


def test_the_result_says_where_and_beside_what_it_was_measured(tmp_path):
    file = tmp_path / "results" / "latest.json"
    failed = run.Outcome([Row("n", "c", 1.5, 2.0)], Noise(0.5, 0.0), 1.0, "FAILED with code 3")
    run.write(file, {"model_step": failed}, Noise(9.0, 0.0))
    content = json.loads(file.read_text())
    assert content["machine"]["cores"] > 0
    assert content["noise"]["is_clean"] is False
    assert content["noise"]["by_benchmark"]["model_step"]["is_clean"] is True
    assert content["rows"] == [{"name": "n", "case": "c", "value": 1.5, "target": 2.0, "better": "lower", "met": True}]
    assert content["failures"] == {"model_step": "FAILED with code 3"}


def test_the_floor_has_every_product_of_a_step():
    config = {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "num_hidden_layers": 30, "vocab_size": 49152,
    }  # fmt: skip
    shapes = _shapes(config)
    assert shapes[:4] == [(960, 576), (576, 576), (3072, 576), (576, 1536)]
    assert len(shapes) == 4 * 30 + 1
    # The parameters of SmolLM2-135M but for its norms.
    assert sum(outputs * inputs for outputs, inputs in shapes) == pytest.approx(134.5e6, rel=0.001)


def test_a_figure_that_was_not_measured_meets_no_target():
    cost = ServiceCost(1.0, 1.0, 1.0, 1.0, 1.0, {63: 100.0, 64: 200.0}, 0.0, 0.0)
    assert cost.loop_us(64) == 200.0
    with pytest.raises(RuntimeError, match="no step had 65 requests"):
        cost.loop_us(65)


@pytest.mark.parametrize(("arguments", "picture"), [([], growth.PICTURE), (["--document"], growth.DOCUMENT)])
def test_the_picture_of_the_documents_is_drawn_only_when_asked(monkeypatch, arguments, picture):
    drawn = []
    monkeypatch.setattr(sys, "argv", ["growth", "--json", *arguments])
    monkeypatch.setattr(growth, "measure", lambda picture: drawn.append(picture) or [])
    growth.main()
    assert drawn == [picture]


def test_what_a_run_draws_is_not_in_the_repository():
    root = growth.engine_flags.ROOT
    assert "/bench/results/" in (root / ".gitignore").read_text().splitlines()
    assert growth.PICTURE.parent == root / "bench" / "results"


def test_the_whole_service_is_measured_at_every_concurrency_of_w1():
    assert whole_service.CONCURRENCIES == (1, 8, 32, 64)


def test_a_model_that_is_driven_directly_gets_what_the_scheduler_sends(monkeypatch, tmp_path):
    executor = Mock()
    executor.sample_tokens.side_effect = lambda bitmask: _done(ModelRunnerOutput([], [[5], [5]]))
    monkeypatch.setattr(loaded_model, "load_model", lambda *arguments: SimpleNamespace(executor=executor))
    monkeypatch.setattr(loaded_model, "resolve_model", lambda *arguments: SimpleNamespace(path=tmp_path))
    model = loaded_model.LoadedModel()
    model.begin([[1, 2, 3], [4]], 2)
    model.decode()
    prefill, decode = (call.args[0] for call in executor.execute_model.call_args_list)
    assert list(prefill.num_scheduled_tokens.values()) == [3, 1]
    # All blocks were sent with the prompts: requests that only go on are in the counts alone.
    assert (decode.new_requests, decode.cached_requests) == ([], [])
    assert list(decode.num_scheduled_tokens.values()) == [1, 1]


def _done(output: ModelRunnerOutput) -> Future[ModelRunnerOutput]:
    future: Future[ModelRunnerOutput] = Future()
    future.set_result(output)
    return future
