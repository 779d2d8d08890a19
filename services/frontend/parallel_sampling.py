"""The n choices of one request as one: its live handles, its admission, its counts, its collector.

Owned by the output processor, on the event loop. A child ends alone; an error ends all.
"""

from __future__ import annotations

from collections.abc import Mapping

from frontend.engine_outputs import EngineFinishReason, EngineOutput
from frontend.generation_events import PromptReady
from frontend.logprobs import PromptLogprobs
from frontend.output_collector import OutputCollector
from frontend.request_stats import RequestStats


class RequestState:
    """The parent of the choices of one request."""

    def __init__(
        self,
        log_fields: Mapping[str, str],
        handles: list[int],
        collector: OutputCollector,
        stats: RequestStats,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        # What every line about it carries.
        self.log_fields = log_fields
        self.collector = collector
        self.stats = stats
        self._prompt_logprobs = prompt_logprobs
        # Handles that have had no end yet.
        self.live_handles = set(handles)
        # An Abort call asked for the end: ABORTED is then an answer and no failure.
        self.is_abort_requested = False
        self._waiting_for_admission = set(handles)

    @property
    def is_streaming(self) -> bool:
        """Admission and prompt are told, and a token has come: nothing but output is expected."""
        return self.stats.has_tokens and not self._waiting_for_admission and self._prompt_logprobs is None

    def note_admitted(self, handle: int) -> None:
        """A child is in the engine's queue; the caller hears of it when all are."""
        if handle in self._waiting_for_admission:
            self._waiting_for_admission.remove(handle)
            if not self._waiting_for_admission:
                self.collector.admit()

    def note_prompt(self, output: EngineOutput) -> None:
        """Collect what is about the prompt; the caller gets it once it is complete."""
        parts = self._prompt_logprobs.take(output) if self._prompt_logprobs is not None else None
        if parts is not None:
            self.collector.put_prompt(PromptReady(tuple(parts), self.stats.usage.cached_prompt_tokens))

    def take_live_handles(self) -> list[int]:
        """All handles still live in the engine; none is left afterwards."""
        handles = sorted(self.live_handles)
        self.live_handles.clear()
        return handles

    def is_failure(self, output: EngineOutput) -> bool:
        """Whether this output ends the request with an error."""
        if output.finish is None:
            return False
        reason = output.finish.reason
        if reason is EngineFinishReason.ABORTED:
            return not self.is_abort_requested
        return reason in (EngineFinishReason.ERROR, EngineFinishReason.REJECTED)
