"""What the bodies of completions and chats have in common, and the parts of the gRPC messages it becomes.

Types only: whether a value is one that makes sense is said once, by the input processor. Lists end where no limit of
its is met any more, before objects are made of them. Names beyond OpenAI's are vLLM's. Pure.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from frontend.api.openai_http.structured_output import ResponseFormat, StructuredOutputs, read_structured_output
from frontend.input_processor.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS_ENTRIES
from frontend.input_processor.stopping import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from stepwire.errors import InvalidRequestError
from stepwire.v1 import common_pb2

UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Part(BaseModel):
    """A JSON object whose unknown fields are ignored, and whose known ones must have their type."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class StreamOptions(Part):
    include_usage: bool | None = None


class GenerationBody(Part):
    """Null is the same as no field, which is the model's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: Annotated[dict[UInt32, float], Field(max_length=MAX_LOGIT_BIAS_ENTRIES)] | None = None
    max_tokens: UInt32 | None = None
    response_format: ResponseFormat | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: list[UInt32] | None = None
    min_tokens: UInt32 | None = None
    stop_token_ids: Annotated[list[UInt32], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, object] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Of a stream, in a chunk of its own at the end."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Raises InvalidRequestError."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError.of_field("stream_options", "only with stream: true")

    def sampling(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            n=self.n,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
        )

    def stop_conditions(self, max_tokens: int | None) -> common_pb2.StopConditions:
        return common_pb2.StopConditions(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            include_stop_in_output=bool(self.include_stop_str_in_output),
        )

    def kv(self) -> common_pb2.KvOptions:
        return common_pb2.KvOptions(cache_salt=self.cache_salt or "")

    def structured_output(self) -> tuple[common_pb2.StructuredOutput | None, dict[str, str]]:
        """The constraint, and what the caller calls it. Raises InvalidRequestError when there are two."""
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        return read_structured_output(self.response_format, self.structured_outputs, guided)
