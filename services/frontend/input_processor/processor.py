"""GenerateRequest in, ProcessedRequest out: the order of checks, and the one place where all parts come together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from frontend.input_processor.field_checks import FieldChecks
from frontend.input_processor.model_facts import ModelFacts
from frontend.input_processor.output_options import add_logprobs, check_prompt_logprobs, read_output
from frontend.input_processor.processed_request import OutputSettings, ProcessedRequest
from frontend.input_processor.prompt import (
    check_prompt,
    check_tokens,
    encode_prompt,
    text_to_encode,
    token_ids_to_keep,
    truncate_prompt,
)
from frontend.input_processor.sampling import num_choices, read_sampling
from frontend.input_processor.stopping import check_stop, resolve_max_tokens, resolve_min_tokens
from frontend.input_processor.structured_output import check_structured_output
from frontend.input_processor.unsupported import refuse_unsupported
from frontend.retry_advice import RETRY_AFTER_MS
from frontend.text_times import TextTimes
from frontend.tokenize_trace import trace_tokenize
from frontend.tokenizer import Tokenizer
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2
from stepwire.errors import InvalidRequestError, RequestFailedError, UnavailableError
from stepwire.v1 import common_pb2, generation_service_pb2

Result = TypeVar("Result")

# The answer has to travel back before the caller gives up.
DEADLINE_MARGIN_S = 0.05


@dataclass(frozen=True, slots=True)
class _Draft:
    """A request that has passed every check for which no tokenizer is needed."""

    request: generation_service_pb2.GenerateRequest
    request_id: str
    client_class: str
    facts: ModelFacts
    arrival_time: float
    deadline_in_s: float | None
    output: OutputSettings
    sampling: engine_core_pb2.EngineSamplingParams
    # Set: a vector is the whole answer.
    pooling: engine_core_pb2.PoolingParams | None

    @property
    def has_text_to_echo(self) -> bool:
        """The text of the caller is the echo as it is."""
        return bool(self.request.text) and not self.request.HasField("truncate_prompt_tokens")

    @property
    def needs_tokenizer(self) -> bool:
        """A token prompt alone does not."""
        has_to_decode = self.output.echo_prompt and not self.has_text_to_echo
        return bool(self.request.text or self.request.sampling.bad_words) or has_to_decode


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What the tokenizer had to say about a request."""

    prompt_token_ids: list[int]
    # Each variant of each.
    bad_words: list[tuple[int, ...]]
    # For the echo.
    prompt_text: str | None


class InputProcessor:
    """Checks and completes requests. `facts` may be replaced as a whole while requests are processed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        num_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
        times: TextTimes | None = None,
    ) -> None:
        self._times = times or TextTimes()
        self.facts = facts
        self._tokenizer = tokenizer
        self._clock = clock
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Let go of the threads. What they were given is still done: somebody waits for it."""
        self._is_closed = True
        self._threads.shutdown(wait=False)

    def check_model(self, name: str) -> None:
        """Raise MODEL_NOT_FOUND unless the name is this model's, or empty."""
        served = self.facts.served_model_name
        if name not in ("", served):
            raise InvalidRequestError.of_field(
                "model", f"{name!r} is not served here; the model is {served!r}", reason="MODEL_NOT_FOUND"
            )

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run work of the tokenizer in one of its threads: on the event loop it would hold up every stream.

        Raises UnavailableError when another model has taken the place of this one.
        """
        if self._is_closed:
            raise UnavailableError("the engines have just changed to another model", retry_after_ms=RETRY_AFTER_MS)
        self._times.num_in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._times.num_in_threads -= 1

    async def process(
        self,
        request: generation_service_pb2.GenerateRequest,
        *,
        request_id: str,
        client_class: str = "",
        deadline_in_s: float | None = None,
        pooling: engine_core_pb2.PoolingParams | None = None,
    ) -> ProcessedRequest:
        """Check and complete a request, which is not changed. With `pooling` its prompt is all that counts.

        Raises InvalidRequestError naming every wrong field, RequestFailedError DEADLINE when time is up already, or
        UnavailableError.
        """
        draft = self._begin(request, request_id, client_class, deadline_in_s, pooling)
        encode = partial(self._encode, draft)
        if not draft.needs_tokenizer:
            return self._complete(draft, encode())
        began = time.monotonic()
        encoded = await self.in_thread(encode)
        trace_tokenize(time.monotonic() - began, len(encoded.prompt_token_ids))
        return self._complete(draft, encoded)

    def process_now(self, request: generation_service_pb2.GenerateRequest, *, request_id: str) -> ProcessedRequest:
        """The same for a caller without an event loop: everything happens in its own thread."""
        draft = self._begin(request, request_id, "", None, None)
        return self._complete(draft, self._encode(draft))

    def _begin(
        self,
        request: generation_service_pb2.GenerateRequest,
        request_id: str,
        client_class: str,
        deadline_in_s: float | None,
        pooling: engine_core_pb2.PoolingParams | None,
    ) -> _Draft:
        """All that can be checked and resolved without the tokenizer."""
        arrival_time = self._clock()
        facts = self.facts if pooling is None else self.facts.without_output()
        self.check_model(request.model)
        checks = FieldChecks()
        output = read_output(request.output, facts, checks)
        sampling = read_sampling(request.sampling, self._tokenizer.defaults, facts.vocab_size, checks)
        check_stop(request.stop, facts.vocab_size, has_text=output.text, checks=checks)
        check_prompt(request, facts, self._tokenizer.max_token_bytes, checks)
        _check_rest(request, checks)
        checks.raise_if_any()
        refuse_unsupported(request, facts)
        return _Draft(request, request_id, client_class, facts, arrival_time, deadline_in_s, output, sampling, pooling)

    def _encode(self, draft: _Draft) -> _Encoded:
        """Prompt ids, cut and checked, and what else the tokenizer has to say. Takes long; touches no state."""
        began = time.perf_counter()
        request, facts = draft.request, draft.facts
        text = text_to_encode(request, facts, self._tokenizer.max_token_bytes)
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        encoded, bad_words = encode_prompt(self._tokenizer, text, add_special_tokens, list(request.sampling.bad_words))
        prompt_token_ids = truncate_prompt(request, encoded or token_ids_to_keep(request, facts), facts)
        checks = FieldChecks()
        check_tokens(request, prompt_token_ids, facts, checks)
        checks.raise_if_any()
        self._times.tokenize.observe(time.perf_counter() - began)
        return _Encoded(prompt_token_ids, bad_words, self._echo(draft, prompt_token_ids))

    def _echo(self, draft: _Draft, prompt_token_ids: list[int]) -> str | None:
        if not draft.output.echo_prompt:
            return None
        if draft.has_text_to_echo:
            return draft.request.text
        [text] = self._tokenizer.decode_batch([prompt_token_ids], skip_special_tokens=draft.output.skip_special_tokens)
        return text

    def _complete(self, draft: _Draft, encoded: _Encoded) -> ProcessedRequest:
        request, facts, sampling, prompt_token_ids = (
            draft.request,
            draft.facts,
            draft.sampling,
            encoded.prompt_token_ids,
        )
        sampling.bad_words.extend(common_pb2.TokenIds(ids=bad_word) for bad_word in encoded.bad_words)
        max_tokens, min_tokens = (0, 0) if draft.pooling else _resolve_lengths(request, len(prompt_token_ids), facts)
        eos_token_ids = tuple(token_id for token_id in self._tokenizer.eos_token_ids if token_id < facts.vocab_size)
        template = _template(request, draft.request_id, prompt_token_ids, sampling, eos_token_ids)
        template.max_tokens, template.min_tokens = max_tokens, min_tokens
        template.client_class = draft.client_class
        if draft.pooling is not None:
            template.pooling.CopyFrom(draft.pooling)
        check_prompt_logprobs(draft.output, len(prompt_token_ids))
        add_logprobs(draft.output, template)
        return ProcessedRequest(
            request_id=draft.request_id,
            model=facts.served_model_name,
            prompt_token_ids=prompt_token_ids,
            prompt_text=encoded.prompt_text,
            num_choices=num_choices(request.sampling),
            seed=sampling.seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_strings=tuple(request.stop.stop),
            include_stop=request.stop.include_stop_in_output,
            eos_token_ids=eos_token_ids,
            resume_output_token_ids=list(request.resume_output_token_ids.ids),
            output=draft.output,
            arrival_time=draft.arrival_time,
            deadline=self._deadline(draft.arrival_time, draft.deadline_in_s),
            queue_deadline=_queue_deadline(request, draft.arrival_time),
            template=template,
        )

    def _deadline(self, arrival_time: float, deadline_in_s: float | None) -> float | None:
        if deadline_in_s is None:
            return None
        deadline = arrival_time + deadline_in_s - DEADLINE_MARGIN_S
        if deadline <= self._clock():
            raise RequestFailedError("the deadline passed before the request reached an engine", reason="DEADLINE")
        return deadline


def _check_rest(request: generation_service_pb2.GenerateRequest, checks: FieldChecks) -> None:
    if request.HasField("queue_timeout_ms"):
        checks.require(request.queue_timeout_ms >= 1, "queue_timeout_ms", "0 is less than 1")
    if request.HasField("structured_output"):
        check_structured_output(request.structured_output, checks)
    if request.resume_output_token_ids.ids:
        n = num_choices(request.sampling)
        checks.require(n == 1, "sampling.n", f"{n} choices cannot be resumed; the limit with resumed output is 1")


def _resolve_lengths(
    request: generation_service_pb2.GenerateRequest, num_prompt_tokens: int, facts: ModelFacts
) -> tuple[int, int]:
    """max_tokens and min_tokens; resumed output counts towards both."""
    checks = FieldChecks()
    max_tokens = resolve_max_tokens(request.stop, num_prompt_tokens, facts)
    min_tokens = resolve_min_tokens(request.stop, max_tokens, checks)
    num_resumed = len(request.resume_output_token_ids.ids)
    checks.require(
        num_resumed < max_tokens,
        "resume_output_token_ids",
        f"{num_resumed} resumed tokens leave nothing to generate of at most {max_tokens}",
    )
    checks.raise_if_any()
    return max_tokens, min_tokens


def _queue_deadline(request: generation_service_pb2.GenerateRequest, arrival_time: float) -> float | None:
    return arrival_time + request.queue_timeout_ms / 1000 if request.HasField("queue_timeout_ms") else None


def _template(
    request: generation_service_pb2.GenerateRequest,
    request_id: str,
    prompt_token_ids: list[int],
    sampling: engine_core_pb2.EngineSamplingParams,
    eos_token_ids: tuple[int, ...],
) -> engine_core_pb2.EngineCoreRequest:
    stop = request.stop
    message = engine_core_pb2.EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_array.pack(prompt_token_ids),
        sampling=sampling,
        stop_token_ids=sorted(set(stop.stop_token_ids)),
        eos_token_ids=eos_token_ids,
        ignore_eos=stop.ignore_eos,
        cache_salt=request.kv.cache_salt,
        bypass_prefix_cache=request.kv.bypass_prefix_cache,
        resume_output_token_ids=token_array.pack(request.resume_output_token_ids.ids),
        priority=request.priority,
    )
    if request.HasField("structured_output"):
        message.structured_output.CopyFrom(request.structured_output)
    if stop.repetition_detection.max_pattern_tokens:
        message.repetition_detection.CopyFrom(stop.repetition_detection)
    return message
