"""One request's answer while it grows: the collector's items in, RequestOutputs out. Owned by LLMEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from frontend.api.logprobs_messages import to_token_logprobs
from frontend.generation_events import ChoiceDelta, ChoiceFinished, CollectorItem, PromptReady
from frontend.input_processor import ProcessedRequest
from frontend.output_collector import OutputCollector
from offline.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from offline.sampling_params import RequestOutputKind
from stepwire.errors import StepwireError
from stepwire.packed_logprobs import PackedLogprobs

TokenBytes = Callable[[int], bytes]


@dataclass(slots=True)
class _Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finished: ChoiceFinished | None = None


class RequestAnswer:
    """Call `read` after each step that brought news of the request."""

    def __init__(
        self,
        processed: ProcessedRequest,
        handles: Sequence[int],
        prompt: str | None,
        kind: RequestOutputKind,
        collector: OutputCollector,
        token_bytes: TokenBytes,
    ) -> None:
        self.request_id = processed.request_id
        self.handles = handles
        self.collector = collector
        self._processed = processed
        self._prompt = prompt
        self._kind = kind
        self._token_bytes = token_bytes
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._choices = [_Choice() for _ in range(processed.num_choices)]
        self._error: StepwireError | None = None

    @property
    def is_finished(self) -> bool:
        """Nothing more will come."""
        return self._error is not None or self.collector.is_done

    def read(self) -> RequestOutput | None:
        """Take what is ready; an output if the caller is to see one now."""
        try:
            items = self.collector.take()
        except StepwireError as error:
            self._error, items = error, []
        has_news = [self._add(item) for item in items].count(True) > 0
        if self.is_finished or (has_news and self._kind is not RequestOutputKind.FINAL_ONLY):
            return self._output()
        return None

    def _add(self, item: CollectorItem) -> bool:
        if isinstance(item, ChoiceDelta):
            self._add_delta(self._choices[item.choice], item)
        elif isinstance(item, ChoiceFinished):
            self._choices[item.choice].finished = item
        elif isinstance(item, PromptReady):
            num_top = self._processed.output.num_prompt_logprobs or 0
            rows = [row for part in item.logprobs for row in self._positions(part, num_top)]
            # Nothing precedes the first token.
            self._prompt_logprobs = [None, *rows]
        else:
            return False
        return True

    def _add_delta(self, choice: _Choice, delta: ChoiceDelta) -> None:
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            rows = list(self._positions(delta.logprobs, self._processed.output.num_logprobs or 0))
            choice.logprobs.extend(rows)
            choice.cumulative_logprob += sum(_own(row).logprob for row in rows)

    def _positions(self, rows: PackedLogprobs, num_top: int) -> Iterator[PositionLogprobs]:
        for position in to_token_logprobs(rows, num_top, self._token_bytes):
            yield {
                entry.token_id: Logprob(
                    entry.logprob, entry.rank if entry.HasField("rank") else None, entry.token_bytes
                )
                for entry in (position.sampled, *position.top)
            }

    def _output(self) -> RequestOutput:
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._processed.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[self._completion(index, choice) for index, choice in enumerate(self._choices)],
            finished=self.is_finished,
            usage=self.collector.usage,
            error=self._error,
        )
        if self._kind is RequestOutputKind.DELTA:
            self._choices = [_Choice(finished=choice.finished) for choice in self._choices]
        return output

    def _completion(self, index: int, choice: _Choice) -> CompletionOutput:
        has_logprobs, finished = self._processed.output.has_logprobs, choice.finished
        return CompletionOutput(
            index=index,
            text=choice.text,
            token_ids=list(choice.token_ids),
            cumulative_logprob=choice.cumulative_logprob if has_logprobs else None,
            logprobs=list(choice.logprobs) if has_logprobs else None,
            finish_reason=None if finished is None else finished.reason.value,
            stop_reason=None if finished is None else _stop_reason(finished),
        )


def _own(position: PositionLogprobs) -> Logprob:
    return next(iter(position.values()))


def _stop_reason(finished: ChoiceFinished) -> str | int | None:
    match = finished.stop_match
    if match is None:
        return None
    return match.stop_string if match.stop_string is not None else match.stop_token_id
