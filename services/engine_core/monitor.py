"""What watches the loop from outside: overdue steps, shutdowns and grammars, slow readers, unused engines.

One thread, waking a few times a second at most. It never asks the loop anything: the loop may be what hangs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from engine_core.config import EngineSettings
from engine_core.core_proc import EngineCoreProc
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.messages import DeathCause, EngineCoreDead
from engine_core.sessions import Sessions
from engine_core.stats_log import StatsLog

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 1.0
# A stalled engine may recover, and a restart costs minutes: liveness gives up much later than readiness.
LIVENESS_GRACE_S = 120.0
# A step may run on after the drain time; then the process ends without asking the loop.
SHUTDOWN_OVERDUE_S = 5.0
# Frontends hear of an idle engine at least this often.
STATS_MAX_GAP_S = 5.0


class Monitor:
    """Step watchdog, slow-session cutter and orphan policy."""

    def __init__(
        self,
        settings: EngineSettings,
        proc: EngineCoreProc,
        sessions: Sessions,
        on_alive: Callable[[bool], None],
        on_hung: Callable[[EngineCoreDead], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._proc = proc
        self._sessions = sessions
        self._on_alive = on_alive
        self._on_hung = on_hung
        self._clock = clock
        self._stats_time = clock()
        self._stats_log = StatsLog(settings.log_stats_interval_s, clock())
        self._stopped = threading.Event()
        self._interval_s = min(MAX_INTERVAL_S, settings.stall_warn_s / 4)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self.check()
            except Exception:
                # Without the watchdog a hung engine would stay: the next look may succeed.
                logger.exception("the monitor failed")

    def check(self) -> None:
        """One look at everything."""
        self._check_step()
        self._check_shutdown()
        self._proc.expire_grammars()
        for session_id in self._proc.output_queue.too_far_behind():
            logger.warning("session %s does not read its outputs and is cut", session_id)
            self._sessions.cut(session_id)
        if self._proc.kv_event_feed is not None:
            self._proc.kv_event_feed.cut_hung()
        if self._settings.owner == "session" and self._sessions.empty_for_s() > self._settings.orphan_timeout_s:
            self._proc.request_shutdown(0.0, "no frontend has been connected for --orphan-timeout-s")
        if self._clock() - self._stats_time >= STATS_MAX_GAP_S:
            self._stats_time = self._clock()
            self._proc.republish_stats()
        self._stats_log.look(self._proc.latest_stats, self._proc.core.times, self._clock())

    def _check_shutdown(self) -> None:
        deadline = self._proc.shutdown_deadline
        if deadline is not None and self._clock() > deadline + SHUTDOWN_OVERDUE_S:
            message = f"the step loop did not leave within {SHUTDOWN_OVERDUE_S:.0f} s of the end of the drain"
            self._end(message)

    def _end(self, message: str) -> None:
        self._on_hung(EngineCoreDead(DeathCause.STEP_TIMEOUT, "StepTimeout", message, self._proc.progress.num_steps))

    def _check_step(self) -> None:
        age_s = self._proc.progress.age_s()
        lifecycle: EngineLifecycle = self._proc.lifecycle
        self._on_alive(age_s < self._settings.stall_warn_s + LIVENESS_GRACE_S)
        if age_s > self._settings.step_timeout_s:
            self._end(f"step {self._proc.progress.num_steps + 1} ran longer than {self._settings.step_timeout_s} s")
        elif age_s > self._settings.stall_warn_s:
            if lifecycle.move_to(EngineState.STALLED):
                logger.error("step %d has been running for %.1f s", self._proc.progress.num_steps + 1, age_s)
        elif lifecycle.end_stall():
            logger.warning("the engine is no longer stalled")
