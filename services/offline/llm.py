"""LLM: whole batches of prompts or conversations to their answers, in the caller's own thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import cast

from engine_core.config import EngineSettings
from frontend.chat_template import Message
from frontend.generation_events import Usage
from offline.batch_progress import BatchProgress
from offline.generate_request import Prompt
from offline.interrupts import interrupted_after
from offline.llm_engine import LLMEngine
from offline.outputs import RequestOutput
from offline.sampling_params import RequestOutputKind, SamplingParams
from stepwire.errors import InvalidRequestError, StepwireError

Conversation = Sequence[Message]
Params = SamplingParams | Sequence[SamplingParams] | None

# The largest that the handshake can state.
_NO_QUEUE_LIMIT = 2**32 - 1
_DEFAULTS: dict[str, object] = {
    # It would step the model in a thread of its own; who wants that overlap asks for it.
    "async_scheduling": False,
    # A batch is the caller's own: there is nobody to protect from its size.
    "max_queued_requests": _NO_QUEUE_LIMIT,
    "max_queued_tokens": _NO_QUEUE_LIMIT,
}


class LLM:
    """`model` and the keywords are the engine's settings, named as its flags: `max_num_seqs`, `dtype`, ...

    Close it, or use it in a `with`, to get the memory back. Raises StartupError when the model can not be loaded.
    """

    def __init__(self, model: str = "embedded", **engine_settings: object) -> None:
        settings = EngineSettings(**{**_DEFAULTS, "model": model, **engine_settings})  # type: ignore[arg-type]  # checked there
        self.llm_engine = LLMEngine(settings)
        self._request_ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back the model's memory. May be repeated."""
        self.llm_engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts, each a text or token ids; parameters for all, or one for each prompt.

        The first request that fails ends the batch and is raised: InvalidRequestError, OverloadedError,
        RequestFailedError or EngineDeadError. With `return_errors` the others go on, and its output has the `error`.
        Raises InvalidRequestError while requests that were added to `llm_engine` by hand are in flight.
        """
        inputs = [partial(_itself, prompt) for prompt in _as_prompts(prompts)]
        return self._run(inputs, sampling_params, use_tqdm, return_errors, add_special_tokens=True)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """The same for one conversation or several, put into text by the model's chat template or by the one given."""
        template = self.llm_engine.chat_template
        if chat_template is not None:
            template = template.with_source(chat_template)
        render = partial(template.render, add_generation_prompt=add_generation_prompt)
        inputs = [partial(render, conversation) for conversation in _as_conversations(messages)]
        return self._run(inputs, sampling_params, use_tqdm, return_errors, add_special_tokens=False)

    def _run(
        self,
        inputs: Sequence[Callable[[], Prompt]],
        params: Params,
        use_tqdm: bool,
        return_errors: bool,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        self._check_idle()
        request_ids = [str(next(self._request_ids)) for _ in inputs]
        every = _params_of_each(params, len(inputs))
        ended: dict[str, RequestOutput] = {}
        try:
            with BatchProgress(len(inputs), is_shown=use_tqdm) as progress:
                for output in self._outputs(request_ids, inputs, every, add_special_tokens):
                    if output.error is not None and not return_errors:
                        output.error.add_note(f"prompt {request_ids.index(output.request_id)} of the batch")
                        raise output.error
                    ended[output.request_id] = output
                    progress.advance(output)
        finally:
            self.llm_engine.abort(request_ids)
        return [ended[request_id] for request_id in request_ids]

    def _check_idle(self) -> None:
        # Whoever added them waits for their outputs, which a batch would read and drop.
        num_others = self.llm_engine.num_requests
        if num_others:
            raise InvalidRequestError(
                f"llm_engine still has {num_others} requests that were added to it: step it to their end, or abort them"
            )

    def _outputs(
        self,
        request_ids: Sequence[str],
        inputs: Sequence[Callable[[], Prompt]],
        every: Sequence[SamplingParams],
        add_special_tokens: bool,
    ) -> Iterator[RequestOutput]:
        """One output of each request: first of those that are refused, then of the others as they end."""
        for request_id, get_prompt, params in zip(request_ids, inputs, every, strict=True):
            final = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
            try:
                prompt = get_prompt()
                with interrupted_after():
                    self.llm_engine.add_request(request_id, prompt, final, add_special_tokens=add_special_tokens)
            except StepwireError as error:
                yield RequestOutput(request_id, None, [], None, [], finished=True, usage=Usage(0, 0, 0), error=error)
        while self.llm_engine.has_unfinished_requests():
            with interrupted_after():
                outputs = self.llm_engine.step()
            yield from outputs


def _itself(prompt: Prompt) -> Prompt:
    return prompt


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return [cast(Prompt, prompts)] if is_one else list(cast(Sequence[Prompt], prompts))


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
    return [cast(Conversation, messages)] if is_one else list(cast(Sequence[Conversation], messages))


def _params_of_each(params: Params, num_prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError.of_field("sampling_params", f"{len(params)} for {num_prompts} prompts")
    return params
