"""The body of /v1/completions as GenerateRequests, one for each of its prompts. Pure."""

from __future__ import annotations

from frontend.api.openai_http.fields import GenerationBody, Int32, UInt32
from frontend.api.openai_http.prompts import Prompts, as_list
from stepwire.errors import InvalidRequestError
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

# OpenAI's.
DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody):
    """OpenAI's legacy completion, which base models are used with."""

    prompt: Prompts
    logprobs: Int32 | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: UInt32 | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int32 | None = None

    def to_requests(self, max_prompts: int) -> tuple[list[GenerateRequest], dict[str, str]]:
        """One request a prompt, and what the caller calls some of their fields. Raises InvalidRequestError."""
        self.check_stream()
        self._refuse_unsupported()
        prompts = as_list(self.prompt)
        if not prompts:
            raise InvalidRequestError.of_field("prompt", "the list is empty")
        if len(prompts) > max_prompts:
            text = f"{len(prompts)} prompts are more than the limit of {max_prompts}"
            raise InvalidRequestError.of_field("prompt", text)
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
