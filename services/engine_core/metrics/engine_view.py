"""What a scrape looks at: the parts of an engine, and the labels that its series begin with.

Read by the threads of scrapes while everything runs on; changes nothing and takes no lock that the loop may want.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_core.core_proc import EngineCoreProc
from engine_core.lifecycle import EngineLifecycle
from engine_core.messages import DeathCause
from engine_core.metrics.recent_memory import RecentMemory
from engine_core.reason_counter import ReasonCounter
from engine_core.scheduler.output import SchedulerStats
from engine_core.sessions import Sessions
from stepwire.histogram import Histogram
from stepwire.metric_rows import HistogramSeries, Series
from stepwire.stream_meter import StreamMeter

PREFIX = "stepwire_engine_core_"
LABELS = ("model_name", "engine_id")


@dataclass(slots=True)
class EngineView:
    """`proc` is None until the model is loaded; whatever comes from it is 0 until then."""

    engine_id: str
    lifecycle: EngineLifecycle
    sessions: Sessions
    meter: StreamMeter
    deaths: ReasonCounter = field(default_factory=lambda: ReasonCounter(cause.name for cause in DeathCause))
    proc: EngineCoreProc | None = None
    # Seconds by phase.
    startup_times: Mapping[str, float] = field(default_factory=dict)
    gpu_memory_utilization: float = 0.0
    memory: RecentMemory = field(default_factory=RecentMemory)
    # Requests whose logits have NaN are counted.
    checks_nan: bool = False

    @property
    def labels(self) -> tuple[str, str]:
        """Values of LABELS."""
        return (self.proc.core.config.served_model.name if self.proc else "", self.engine_id)

    @property
    def stats(self) -> SchedulerStats:
        """The newest snapshot of the scheduler."""
        return self.proc.latest_stats if self.proc else SchedulerStats()

    def by(self, numbers: Mapping[str, float]) -> list[Series]:
        """A series for each value of one more label."""
        return [((*self.labels, value), number) for value, number in numbers.items()]

    def histograms_by(self, found: Mapping[str, Histogram]) -> list[HistogramSeries]:
        """The same of histograms."""
        return [((*self.labels, value), histogram) for value, histogram in found.items()]
