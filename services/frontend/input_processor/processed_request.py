"""A request as the rest of the frontend knows it: checked, complete, immutable.

Holds what the output processor needs in plain types, and the engine's message as a template that is only copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from frontend.input_processor.sampling import child_seed
from stepwire.engine.v1 import engine_core_pb2
from stepwire.errors import InvalidRequestError
from stepwire.tracing import trace_id_of

_US_PER_S = 1_000_000
# All choices together, as they are sent to the engine. Far below the 64 MiB of a message, so that one always fits.
MAX_ENGINE_BYTES = 32 * 1024 * 1024
# Handle, seed and times, and the frame around them: what the template does not have yet.
_MAX_CHOICE_BYTES = 64


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """OutputOptions with every default resolved; `max_chunk_delay_s` 0 = no bound."""

    text: bool = True
    token_ids: bool = False
    skip_special_tokens: bool = True
    min_chunk_tokens: int = 0
    max_chunk_delay_s: float = 0.0
    timings: bool = False
    echo_prompt: bool = False
    # Of each output position, besides its own: None = no log-probabilities, unless ids were chosen.
    num_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    # The same of the prompt; None = none.
    num_prompt_logprobs: int | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.num_logprobs is not None or bool(self.logprob_token_ids)

    @property
    def logprobs_width(self) -> int:
        """Entries of an output position: its own token, the most likely, the chosen ones."""
        return 1 + (self.num_logprobs or 0) + len(self.logprob_token_ids)


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """One request, all its choices. Times are seconds of the frontend's monotonic clock."""

    request_id: str
    model: str
    prompt_token_ids: list[int]
    # Set with output.echo_prompt only.
    prompt_text: str | None
    num_choices: int
    # Of choice 0.
    seed: int
    max_tokens: int
    min_tokens: int
    stop_strings: tuple[str, ...]
    include_stop: bool
    eos_token_ids: tuple[int, ...]
    # Part of the output that the caller has already.
    resume_output_token_ids: list[int]
    output: OutputSettings
    arrival_time: float
    deadline: float | None
    queue_deadline: float | None
    # Everything of the engine's message that does not depend on the choice or on when it is sent.
    template: engine_core_pb2.EngineCoreRequest

    @property
    def log_fields(self) -> dict[str, str]:
        """What every line about it carries; the trace is known once its context is in the template."""
        trace_id = trace_id_of(self.template.traceparent)
        return {"request_id": self.request_id, **({"trace_id": trace_id} if trace_id else {})}

    def size_for_engine(self) -> int:
        """Bytes of the message for one choice, at most. Raises InvalidRequestError when all choices are too many."""
        num_bytes = self.template.ByteSize() + _MAX_CHOICE_BYTES
        if self.num_choices * num_bytes > MAX_ENGINE_BYTES:
            raise InvalidRequestError.of_field(
                "sampling.n" if self.num_choices > 1 else "prompt",
                f"{self.num_choices} x {num_bytes} bytes for the engine are more than the limit of {MAX_ENGINE_BYTES}; "
                "each choice takes the prompt, sampling.allowed_token_ids, sampling.logit_bias and sampling.bad_words",
            )
        return num_bytes

    def fill(self, choice: int, message: engine_core_pb2.EngineCoreRequest, handle: int, now: float) -> None:
        """Make an empty message the one for this choice, with its times as of `now`."""
        message.CopyFrom(self.template)
        if choice:
            # All choices have the same prompt, and it is answered once.
            message.ClearField("prompt_logprobs")
        message.handle = handle
        message.sampling.seed = child_seed(self.seed, choice)
        message.age_us = max(0, round((now - self.arrival_time) * _US_PER_S))
        message.deadline_in_us = _remaining_us(self.deadline, now)
        message.queue_deadline_in_us = _remaining_us(self.queue_deadline, now)


def _remaining_us(deadline: float | None, now: float) -> int:
    # 0 means "none" on the wire: a deadline that has just passed is sent as the shortest one.
    return 0 if deadline is None else max(1, round((deadline - now) * _US_PER_S))
