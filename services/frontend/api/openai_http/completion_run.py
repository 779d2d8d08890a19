"""One prompt of /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from frontend.api.answering import rank_of
from frontend.api.logprobs_messages import num_entries, to_token_logprobs
from frontend.api.openai_http.call import HttpCall
from frontend.api.openai_http.logprobs import CompletionLogprobs
from frontend.api.openai_http.run import Choice, Run, finish_reason, stop_reason
from frontend.generation_events import ChoiceDelta, ChoiceFinished, CollectorItem, PromptReady
from frontend.input_processor import ProcessedRequest
from frontend.llm_frontend import LLMFrontend
from stepwire.packed_logprobs import PackedLogprobs
from stepwire.v1.common_pb2 import TokenLogprobs
from stepwire.v1.generation_service_pb2 import GenerateRequest


class CompletionRun(Run[CollectorItem]):
    """A GenerateRequest, and its events as parts of OpenAI's choices."""

    processed: ProcessedRequest

    def __init__(
        self, frontend: LLMFrontend, call: HttpCall, request_id: str, first_choice: int, request: GenerateRequest
    ) -> None:
        super().__init__(frontend, call, request_id, first_choice)
        self._request = request
        self._has_prompt = False
        # What has come before the rows of the prompt.
        self._held: list[CollectorItem] = []
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)

    async def submit(self) -> None:
        self.processed = await self.generation.model.input_processor.process(
            self._request, request_id=self.request_id, client_class=self.generation.caller.client_class
        )
        self.generation.submit(self.processed, rank_of(self.call))

    async def next(self) -> Sequence[CollectorItem]:
        while events := await self.generation.next():
            if in_order := self._behind_prompt(events):
                return in_order
        # Nothing, unless the prompt's rows never came: its request ended before its first token.
        return self._take_held()

    def _behind_prompt(self, events: Sequence[CollectorItem]) -> Sequence[CollectorItem]:
        """Rows of an echoed prompt belong in front, but come with the first choice: others may be ahead of it."""
        if self._has_prompt or self.processed.output.num_prompt_logprobs is None:
            return events
        self._held.extend(events)
        prompts = [event for event in events if isinstance(event, PromptReady)]
        if not prompts:
            return ()
        self._has_prompt = True
        return [*prompts, *(event for event in self._take_held() if not isinstance(event, PromptReady))]

    def _take_held(self) -> list[CollectorItem]:
        held, self._held = self._held, []
        return held

    def num_entries(self, events: Sequence[CollectorItem]) -> int:
        return sum(map(num_entries, events))

    def to_choices(self, events: Sequence[CollectorItem]) -> Iterator[Choice]:
        for event in events:
            if isinstance(event, ChoiceDelta):
                yield self._part(event.choice, event.text, logprobs=self._output_logprobs(event))
            elif isinstance(event, ChoiceFinished):
                yield self._part(
                    event.choice,
                    finish_reason=finish_reason(event.reason.value),
                    stop_reason=stop_reason(event.stop_match),
                )
            elif isinstance(event, PromptReady):
                for choice in range(self.processed.num_choices):
                    yield self._part(choice, logprobs=self._prompt_logprobs(choice, event))

    def _part(self, choice: int, text: str = "", **changed: Any) -> Choice:
        empty = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        return {"index": self.first_choice + choice, "text": text, **empty, **changed}

    def _output_logprobs(self, event: ChoiceDelta) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        rows = self._rows(event.logprobs, self.processed.output.num_logprobs)
        return self._logprobs[event.choice].of(rows)

    def _prompt_logprobs(self, choice: int, event: PromptReady) -> dict[str, Any]:
        """Of an echoed prompt: in front of those of the output."""
        first = self.generation.model.tokenizer.token_bytes(self.processed.prompt_token_ids[0])
        rows = [TokenLogprobs()]
        for packed in event.logprobs:
            rows.extend(self._rows(packed, self.processed.output.num_prompt_logprobs))
        return self._logprobs[choice].of(rows, first_token=first)

    def _rows(self, packed: PackedLogprobs, num_top: int | None) -> Iterator[TokenLogprobs]:
        return to_token_logprobs(packed, num_top or 0, self.generation.model.tokenizer.token_bytes)
