"""The engine core as a process: gRPC server, metrics port, start-up, busy loop, and both ways to end.

The main thread loads the model and then is the busy loop. Everything else lives in threads of its own.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import grpc

from engine_core import owner
from engine_core.config import EngineSettings
from engine_core.core import EngineCore
from engine_core.core_proc import EngineCoreProc
from engine_core.death import as_error, describe_death, start_failure
from engine_core.health import EngineHealth
from engine_core.kv_event_feed import MAX_SUBSCRIBERS, KVEventFeed
from engine_core.kv_events_server import KV_EVENTS_SERVICE_NAME, KvEventsServicer
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.messages import EngineCoreDead
from engine_core.metrics import EngineView, make_registry
from engine_core.model_executor.startup_error import StartupError
from engine_core.monitor import Monitor
from engine_core.output_queue import OutputQueue
from engine_core.server import CONNECT_METHOD, MAX_GRPC_THREADS, SERVICE_NAME, EngineCoreServicer
from engine_core.sessions import Sessions
from engine_core.shutdown import ShutdownController
from engine_core.startup import ModelLoader, start_engine
from engine_core.startup_trace import trace_startup
from engine_core.step_progress import StepProgress
from engine_core.step_traces import StepTraces
from engine_core.stream_interceptor import StreamInterceptor
from engine_core.wire import RECEIVED_KINDS, SENT_KINDS, FrameEncoder
from stepwire import grpc_options, log, tracing
from stepwire.engine.v1 import engine_core_pb2_grpc
from stepwire.errors import StepwireError
from stepwire.grpc_server import bind, enable_reflection
from stepwire.lag import InterpreterLag
from stepwire.metrics import serve_http
from stepwire.stream_meter import StreamMeter

logger = logging.getLogger(__name__)

DEAD_FRAME_WAIT_S = 5.0
# Streams are over by then; what would hold the server longer is an open health Watch.
SERVER_STOP_GRACE_S = 0.5
CLEANUP_BOUND_S = 10.0
# Collections of the middle generation before a full one comes by itself.
NEVER = 2**31 - 1


class EngineProcess:
    """Builds the parts, runs them, and turns every end into an exit code."""

    def __init__(self, settings: EngineSettings, load_model: ModelLoader) -> None:
        self._settings = settings
        self._load_model = load_model
        self._clock = time.monotonic
        self._lifecycle = EngineLifecycle()
        self._progress = StepProgress(self._clock)
        self._output_queue = OutputQueue(self._clock)
        self._sessions = Sessions(self._clock)
        self._health = EngineHealth(SERVICE_NAME)
        self._meter = StreamMeter(SENT_KINDS, RECEIVED_KINDS)
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_GRPC_THREADS + MAX_SUBSCRIBERS, "grpc"),
            interceptors=[StreamInterceptor(CONNECT_METHOD, self._meter)],
            options=grpc_options.SERVER,
        )
        self._kv_event_feed = _make_feed(settings)
        self._shutdown = ShutdownController(settings.drain_timeout_s, self._stop_server)
        self._proc: EngineCoreProc | None = None
        self._step_traces: StepTraces | None = None
        # Reported by the executor while the engine was still starting.
        self._early_failure: BaseException | None = None
        self._death_lock = threading.Lock()

    def run(self) -> int:
        """Serve until told to end; returns the exit code. Raises BindError when a port is taken."""
        owner.listen_for_signals(self._shutdown.request)
        boot_id = uuid.uuid4().hex
        self._end_tracing = tracing.start("stepwire-engine-core", boot_id, self._settings)
        port = bind(self._server, self._settings.host, self._settings.port, self._settings.tls)
        engine_id = self._settings.engine_id or f"{socket.gethostname()}:{port}"
        log.identify_process(engine_id=engine_id)
        servicer = self._make_servicer(engine_id, boot_id)
        self._view = EngineView(engine_id, self._lifecycle, self._sessions, self._meter)
        self._view.gpu_memory_utilization = self._settings.gpu_memory_utilization
        self._view.checks_nan = self._settings.check_nan
        metrics_port = self._serve_metrics()
        self._lifecycle.listen(self._health.on_state)
        self._server.start()
        logger.info("engine core %s listens on port %d, metrics on port %d", engine_id, port, metrics_port)
        if self._settings.owner == "parent":
            owner.watch_parent(self._shutdown.request_now)
        exit_code = self._serve() if self._start(servicer) else 1
        owner.ignore_signals()
        return exit_code

    def _make_servicer(self, engine_id: str, boot_id: str) -> EngineCoreServicer:
        encoder = FrameEncoder(
            engine_id,
            boot_id,
            self._lifecycle,
            self._progress,
            self._clock,
            ping_interval_ms=self._settings.ping_interval_ms,
            ping_timeout_ms=self._settings.ping_timeout_ms,
            data_parallel_rank=self._settings.data_parallel_rank,
            data_parallel_size=self._settings.data_parallel_size,
            tensor_parallel_size=self._settings.tensor_parallel_size,
            pipeline_parallel_size=self._settings.pipeline_parallel_size,
            is_tracing=tracing.detail.follows_callers,
            num_frontends=lambda: len(self._sessions),
        )
        servicer = EngineCoreServicer(encoder, self._lifecycle, self._output_queue, self._sessions, self._meter)
        engine_core_pb2_grpc.add_EngineCoreServiceServicer_to_server(servicer, self._server)
        settings = self._settings
        kv_events = KvEventsServicer(self._kv_event_feed, settings.block_size, settings.data_parallel_rank)
        engine_core_pb2_grpc.add_KvEventsServiceServicer_to_server(kv_events, self._server)
        self._health.add_to(self._server)
        if settings.enable_reflection:
            enable_reflection(self._server, [SERVICE_NAME, KV_EVENTS_SERVICE_NAME])
        return servicer

    def _serve_metrics(self) -> int:
        registry, process_metrics = make_registry(self._view, self._settings.metrics_alias)
        process_metrics.start()
        InterpreterLag(process_metrics.lag).start()
        port, _ = serve_http(
            self._settings.metrics_port,
            registry,
            lambda: self._health.is_ready,
            lambda: self._health.is_alive,
            host=self._settings.host,
        )
        return port

    # -- start -------------------------------------------------------------------------------------------------------

    def _start(self, servicer: EngineCoreServicer) -> bool:
        """Load the model and open the doors; False when that failed, which is logged."""
        timer = threading.Timer(self._settings.ready_timeout_s, self._start_timed_out)
        timer.daemon = True
        timer.start()
        try:
            started = start_engine(
                self._settings,
                self._load_model,
                self._executor_failed,
                self._model_loaded,
                self._clock,
            )
        except StartupError as error:
            logger.critical("can not start: %s", error)
            failure = start_failure(error)
        except Exception as error:
            logger.critical("can not start", exc_info=True)
            failure = start_failure(error)
        else:
            self._proc = EngineCoreProc(
                started.core,
                self._output_queue,
                self._lifecycle,
                self._progress,
                self._clock,
                profile_dir=self._settings.profile_dir,
                drain=self._shutdown.drain,
                kv_event_feed=self._kv_event_feed,
            )
            self._trace_steps(started.core)
            self._view.startup_times = started.times
            trace_startup(started.times, self._clock())
            self._view.proc = self._proc
            servicer.start_serving(self._proc, started.tokenizer_archive)
            self._shutdown.attach(self._proc)
            self._sessions.start_waiting()
            self._lifecycle.move_to(EngineState.RUNNING)
            if self._early_failure is not None:
                self._proc.executor_failed(self._early_failure)
            return True
        finally:
            timer.cancel()
        self._view.deaths.add(failure.cause.name)
        servicer.start_failed(failure)
        self._end_kv_events(as_error(failure))
        self._lifecycle.move_to(EngineState.DEAD)
        self._stop_server()
        return False

    def _trace_steps(self, core: EngineCore) -> None:
        if tracing.detail.ratio:
            self._step_traces = StepTraces(tracing.detail, tracing.WallClock(), self._sessions.trace_context)
            core.on_step = self._step_traces.note

    def _model_loaded(self) -> None:
        self._lifecycle.move_to(EngineState.WARMING_UP)

    def _start_timed_out(self) -> None:
        logger.critical("the model was not ready within --ready-timeout-s %.0f", self._settings.ready_timeout_s)
        self._lifecycle.move_to(EngineState.DEAD)
        self._stop_server()
        # The main thread is somewhere inside the loader; only the end of the process frees the device.
        os._exit(1)

    def _executor_failed(self, error: BaseException) -> None:
        if self._proc is None:
            self._early_failure = error
        else:
            self._proc.executor_failed(error)

    # -- serve -------------------------------------------------------------------------------------------------------

    def _serve(self) -> int:
        if self._proc is None:
            raise RuntimeError("serve before start")
        monitor = Monitor(
            self._settings, self._proc, self._sessions, self._health.set_alive, self._die_hung, self._clock
        )
        monitor.start()
        _leave_full_collections_to_the_loop()
        try:
            self._proc.run_busy_loop()
        except Exception as error:
            monitor.stop()
            self._die(describe_death(error, self._progress.num_steps), error)
            self._clean_up()
            return 1
        monitor.stop()
        self._leave()
        return 0

    def _leave(self) -> None:
        """A drain is complete: deliver what is queued, end the streams with OK, release the device."""
        self._output_queue.end_all()
        if not self._output_queue.wait_written(DEAD_FRAME_WAIT_S):
            logger.warning("not all outputs could be delivered within %.0f s", DEAD_FRAME_WAIT_S)
        self._stop_server()
        self._clean_up()
        logger.info("clean exit after %d steps", self._progress.num_steps)

    def _die(self, dead: EngineCoreDead, error: BaseException | None) -> None:
        """Tell every stream why, as its last frame."""
        with self._death_lock:
            logger.critical("ENGINE_CORE_DEAD %s", dead, exc_info=error)
            self._view.deaths.add(dead.cause.name)
            self._lifecycle.move_to(EngineState.DEAD)
            self._output_queue.put_dead(dead)
            self._end_kv_events(as_error(dead))
            if not self._output_queue.wait_written(DEAD_FRAME_WAIT_S):
                logger.critical("not every frontend could be told of the death within %.0f s", DEAD_FRAME_WAIT_S)
            self._stop_server()

    def _die_hung(self, dead: EngineCoreDead) -> None:
        """Called by the monitor: the loop hangs in its step, so nothing may be asked of it."""
        try:
            self._die(dead, None)
        finally:
            os._exit(1)

    def _end_kv_events(self, error: StepwireError | None = None) -> None:
        if self._kv_event_feed is not None:
            self._kv_event_feed.close(error)

    def _stop_server(self) -> None:
        self._end_kv_events()
        self._server.stop(SERVER_STOP_GRACE_S).wait(SERVER_STOP_GRACE_S + 1)

    def _clean_up(self) -> None:
        """Release the device within a bound: a driver that hangs here must not keep the process alive."""
        timer = threading.Timer(CLEANUP_BOUND_S, os._exit, (1,))
        timer.daemon = True
        # Never cancelled: what comes after this, up to the end of the process, is bounded by it too.
        timer.start()
        if self._step_traces is not None:
            self._step_traces.close()
        self._end_tracing()
        if self._proc is not None:
            self._proc.core.shutdown()
        gc.unfreeze()


def _make_feed(settings: EngineSettings) -> KVEventFeed | None:
    if not settings.enable_kv_events:
        return None
    # From the clock: an engine that starts again numbers on above whatever it has published before.
    return KVEventFeed(time.time_ns() // 1000, settings.kv_events_buffer_blocks, time.monotonic)


def _leave_full_collections_to_the_loop() -> None:
    """By itself one would come in the middle of a step and walk every live request; the loop makes it when idle.

    Until then nothing gathers: requests are in no reference cycles.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
