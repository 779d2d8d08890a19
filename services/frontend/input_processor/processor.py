"""GenerateRequest in, ProcessedRequest out: the order of checks, and the one place where all parts come together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from frontend.tokenizer import Tokenizer
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2
from stepwire.errors import InvalidRequestError, RequestFailedError
from stepwire.v1 import common_pb2, generation_service_pb2

Result = TypeVar("Result")

# The answer has to travel back before the caller gives up.
DEADLINE_MARGIN_S = 0.05


class InputProcessor:
    """Checks and completes requests. `facts` may be replaced as a whole while requests are processed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        *,
        num_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self._tokenizer = tokenizer
        self._clock = clock
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Let go of the threads. What they were given is still done: somebody waits for it."""
        self._threads.shutdown(wait=False)

    def check_model(self, name: str) -> None:
        """Raise MODEL_NOT_FOUND unless the name is this model's, or empty."""
        served = self.facts.served_model_name
        if name not in ("", served):
            raise InvalidRequestError.of_field(
                "model", f"{name!r} is not served here; the model is {served!r}", reason="MODEL_NOT_FOUND"
            )

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run work of the tokenizer in one of its threads: on the event loop it would hold up every stream."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def process(
        self,
        request: generation_service_pb2.GenerateRequest,
        *,
        request_id: str,
        client_class: str = "",
        deadline_in_s: float | None = None,
    ) -> ProcessedRequest:
        """Check and complete a request, which is not changed.

        Raises InvalidRequestError naming every wrong field, or RequestFailedError DEADLINE when time is up already.
        """
        arrival_time, facts = self._clock(), self.facts
        output, sampling = self._read(request, facts)
        prompt_token_ids = await self._encode(request, sampling, facts)
        max_tokens, min_tokens = _resolve_lengths(request, len(prompt_token_ids), facts)
        eos_token_ids = tuple(token_id for token_id in self._tokenizer.eos_token_ids if token_id < facts.vocab_size)
        template = _template(request, request_id, prompt_token_ids, sampling, eos_token_ids)
        template.max_tokens, template.min_tokens = max_tokens, min_tokens
        template.client_class = client_class
        check_prompt_logprobs(output, len(prompt_token_ids))
        add_logprobs(output, template)
        return ProcessedRequest(
            request_id=request_id,
            model=facts.served_model_name,
            prompt_token_ids=prompt_token_ids,
            prompt_text=await self._echo(request, prompt_token_ids, output),
            num_choices=num_choices(request.sampling),
            seed=sampling.seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_strings=tuple(request.stop.stop),
            include_stop=request.stop.include_stop_in_output,
            eos_token_ids=eos_token_ids,
            resume_output_token_ids=list(request.resume_output_token_ids.ids),
            output=output,
            arrival_time=arrival_time,
            deadline=self._deadline(arrival_time, deadline_in_s),
            queue_deadline=_queue_deadline(request, arrival_time),
            template=template,
        )

    def _read(
        self, request: generation_service_pb2.GenerateRequest, facts: ModelFacts
    ) -> tuple[OutputSettings, engine_core_pb2.EngineSamplingParams]:
        """All that can be checked and resolved without the tokenizer."""
        self.check_model(request.model)
        checks = FieldChecks()
        output = read_output(request.output, facts, checks)
        sampling = read_sampling(request.sampling, self._tokenizer.defaults, facts.vocab_size, checks)
        check_stop(request.stop, facts.vocab_size, has_text=output.text, checks=checks)
        check_prompt(request, facts, self._tokenizer.max_token_bytes, checks)
        _check_rest(request, checks)
        checks.raise_if_any()
        refuse_unsupported(request, facts)
        return output, sampling

    async def _encode(
        self,
        request: generation_service_pb2.GenerateRequest,
        sampling: engine_core_pb2.EngineSamplingParams,
        facts: ModelFacts,
    ) -> list[int]:
        """Prompt ids, cut and checked; bad words go into `sampling`. A token prompt without them needs no thread."""
        prompt_token_ids, bad_words = token_ids_to_keep(request, facts), list(request.sampling.bad_words)
        text = text_to_encode(request, facts, self._tokenizer.max_token_bytes)
        if text or bad_words:
            add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
            encoded, variants = await self.in_thread(
                partial(encode_prompt, self._tokenizer, text, add_special_tokens, bad_words)
            )
            prompt_token_ids = encoded or prompt_token_ids
            sampling.bad_words.extend(common_pb2.TokenIds(ids=variant) for variant in variants)
        prompt_token_ids = truncate_prompt(request, prompt_token_ids, facts)
        checks = FieldChecks()
        check_tokens(request, prompt_token_ids, facts, checks)
        checks.raise_if_any()
        return prompt_token_ids

    async def _echo(
        self, request: generation_service_pb2.GenerateRequest, prompt_token_ids: list[int], output: OutputSettings
    ) -> str | None:
        if not output.echo_prompt:
            return None
        if request.text and not request.HasField("truncate_prompt_tokens"):
            return request.text
        decode = partial(self._tokenizer.decode_batch, skip_special_tokens=output.skip_special_tokens)
        [text] = await self.in_thread(partial(decode, [prompt_token_ids]))
        return text

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
