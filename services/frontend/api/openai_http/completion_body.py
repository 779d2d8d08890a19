"""The body of /v1/completions as GenerateRequests, one for each of its prompts. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from frontend.api.openai_http.fields import GenerationBody, Int32, UInt32
from stepwire.errors import InvalidRequestError
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

# OpenAI's.
DEFAULT_MAX_TOKENS = 16


class _FailFast(FailFast):
    """Unions hash their members."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


_Strings = Annotated[list[str], _FailFast()]
_TokenIds = Annotated[list[UInt32], _FailFast()]
_TokenIdLists = Annotated[list[_TokenIds], _FailFast()]
# In this order, and each given up at its first mistake: a prompt may have a hundred thousand ids.
_Prompt = Annotated[str | _Strings | _TokenIds | _TokenIdLists, Field(union_mode="left_to_right")]


class CompletionBody(GenerationBody):
    """OpenAI's legacy completion, which base models are used with."""

    prompt: _Prompt
    logprobs: Int32 | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: UInt32 | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int32 | None = None

    def to_requests(self) -> tuple[list[GenerateRequest], dict[str, str]]:
        """One request a prompt, and what the caller calls some of their fields. Raises InvalidRequestError."""
        self.check_stream()
        self._refuse_unsupported()
        prompts = self._prompts()
        if not prompts:
            raise InvalidRequestError.of_field("prompt", "the list is empty")
        constraint, names = self.structured_output()
        request = GenerateRequest(
            model=self.model or "",
            sampling=self.sampling(),
            stop=self.stop_conditions(DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens),
            output=common_pb2.OutputOptions(
                logprobs=self.logprobs,
                prompt_logprobs=self.logprobs if self.echo else None,
                echo_prompt=bool(self.echo),
                skip_special_tokens=self.skip_special_tokens,
            ),
            structured_output=constraint,
            kv=self.kv(),
            priority=self.priority or 0,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens,
        )
        return [_with_prompt(request, prompt) for prompt in prompts], {**names, "output.prompt_logprobs": "logprobs"}

    def _prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]  # not ints, as the first is none

    def _refuse_unsupported(self) -> None:
        if self.suffix:
            raise InvalidRequestError.of_field("suffix", "not supported by this server", reason="UNSUPPORTED_FEATURE")
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise InvalidRequestError.of_field(
                "best_of", "not supported by this server unless it equals n", reason="UNSUPPORTED_FEATURE"
            )


def _with_prompt(request: GenerateRequest, prompt: str | list[int]) -> GenerateRequest:
    message = GenerateRequest()
    message.CopyFrom(request)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message
