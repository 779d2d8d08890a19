"""What scrapes cost: how much longer the same steps take while another thread renders all metrics of an engine.

The loop runs around an executor that answers at once, so that it wants the interpreter all the time: the worst case.
Runs with and without scrapes take turns, and what a scrape costs is set against the time between two of them.

Of a frontend the rendering alone is timed: all methods, and the series of some engines.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator

from google.protobuf import descriptor_pool

from bench import rows
from bench.instant_executor import InstantExecutor
from bench.rows import Row
from engine_core.config import EngineSettings
from engine_core.core_proc import EngineCoreProc
from engine_core.lifecycle import EngineLifecycle
from engine_core.metrics import EngineView, make_registry
from engine_core.model_executor.executor import FailureCallback
from engine_core.output_queue import OutputQueue
from engine_core.resolved_config import ServedModel
from engine_core.scheduler.request import Request, SamplingParams, StopConditions
from engine_core.sessions import Sessions
from engine_core.startup import LoadedModel, Progress, start_engine
from engine_core.step_progress import StepProgress
from engine_core.wire import RECEIVED_KINDS, SENT_KINDS
from frontend.admin_server import METHODS
from frontend.metrics import FrontendMetrics
from frontend.server import HEALTH_METHODS, SERVICE_NAMES
from stepwire.metrics import encoder_for
from stepwire.stream_meter import StreamMeter

NUM_RUNNING = 64
NUM_STEPS = 3000
NUM_ROUNDS = 5
# Between two scrapes of the bench, and of a usual Prometheus.
PAUSE_S = 0.1
INTERVAL_S = 15.0
NUM_BLOCKS = 1 << 15
NUM_ENGINES = 4
NUM_FRONTEND_SCRAPES = 50
# Of a scrape.
TARGET_MS = 20.0
# Of the loop's time.
TARGET_PERCENT = 1.0


def measure() -> Iterator[Row]:
    alone_s, scraped = [], []
    for _ in range(NUM_ROUNDS):
        alone_s.append(_Run(is_scraped=False).seconds)
        scraped.append(_Run(is_scraped=True))
    without_s = statistics.median(alone_s)
    num_scrapes = statistics.fmean(run.num_scrapes for run in scraped)
    cost_s = max(0.0, statistics.median(run.seconds for run in scraped) - without_s) / num_scrapes
    case = f"{NUM_RUNNING} running"
    yield Row(
        "a scrape of the engine, ms of its thread", case, statistics.median(scraped[-1].scrape_s) * 1e3, TARGET_MS
    )
    yield Row("what it costs the loop, ms", case, cost_s * 1e3)
    yield Row("the same, % of the loop, every 15 s", case, 100 * cost_s / INTERVAL_S, TARGET_PERCENT)
    yield Row("the same, % of the loop, every second", case, 100 * cost_s)
    case = f"{NUM_ENGINES} engines"
    yield Row("a scrape of the frontend, ms of its thread", case, _frontend_scrape_s() * 1e3, TARGET_MS)


class _Run:
    """The same steps from a fresh start."""

    def __init__(self, *, is_scraped: bool) -> None:
        self.scrape_s: list[float] = []
        proc = _make_proc()
        stopped = threading.Event()
        scraper = threading.Thread(target=self._scrape, args=(proc, stopped))
        if is_scraped:
            scraper.start()
        began = time.perf_counter()
        while proc.core.num_steps < NUM_STEPS:
            proc._process_step()
        self.seconds = time.perf_counter() - began
        stopped.set()
        if is_scraped:
            scraper.join()

    @property
    def num_scrapes(self) -> int:
        return len(self.scrape_s)

    def _scrape(self, proc: EngineCoreProc, stopped: threading.Event) -> None:
        view = EngineView("bench", proc.lifecycle, Sessions(time.monotonic), StreamMeter(SENT_KINDS, RECEIVED_KINDS))
        view.proc = proc
        registry, _ = make_registry(view, "vllm")
        encode, _ = encoder_for("")
        while not stopped.wait(PAUSE_S):
            began = time.thread_time()
            encode(registry)
            self.scrape_s.append(time.thread_time() - began)


def _frontend_scrape_s() -> float:
    served, (encode, _) = _make_frontend_metrics().served("vllm"), encoder_for("")
    times = []
    for _ in range(NUM_FRONTEND_SCRAPES):
        began = time.thread_time()
        encode(served)
        times.append(time.thread_time() - began)
    return statistics.median(times)


def _make_frontend_metrics() -> FrontendMetrics:
    """As they are when every engine has had requests."""
    metrics = FrontendMetrics()
    services = [descriptor_pool.Default().FindServiceByName(name) for name in SERVICE_NAMES]
    public = [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    metrics.expect_methods((*public, *HEALTH_METHODS, *METHODS))
    engine_ids = [f"engine-{number}" for number in range(NUM_ENGINES)]
    metrics.set_engines_up(dict.fromkeys(engine_ids, True))
    for engine_id in engine_ids:
        metrics.engine_attached(engine_id)
        metrics.of_model("bench", engine_id)
    for method in public:
        metrics.rpc_duration.labels(method, "OK").observe(0.1)
    return metrics


def _make_proc() -> EngineCoreProc:
    executor = InstantExecutor(NUM_BLOCKS)

    def load(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
        return LoadedModel(executor, ServedModel("instant", "", ""), b"")

    settings = EngineSettings(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=8192)
    core = start_engine(settings, load, lambda error: None, lambda: None, time.monotonic).core
    proc = EngineCoreProc(
        core, OutputQueue(time.monotonic), EngineLifecycle(), StepProgress(time.monotonic), time.monotonic
    )
    for handle in range(NUM_RUNNING):
        stop = StopConditions(max_tokens=NUM_STEPS + 100)
        request = Request(("bench", handle), f"request-{handle}", [10 + handle, 11], SamplingParams(), stop, 0.0)
        core.preprocess_add_request(request)
        core.add_request(request)
    return proc


if __name__ == "__main__":
    rows.main(measure)
