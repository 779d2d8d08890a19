"""ChatRequest in, GenerateRequest out: checks, rendering, the grammar of the calls, and which parsers read the answer.

Touches no state; takes long, for the tokenizer's threads.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from frontend.chat import tool_grammar
from frontend.chat.conversation import read_conversation, read_template
from frontend.chat.enforced_calls import EnforcedCalls
from frontend.chat.model import ChatModel
from frontend.chat.rendering import RenderedPrompt, render
from frontend.chat.tools import ToolMode, ToolPlan, read_tools
from frontend.input_processor.field_checks import FieldChecks
from frontend.output_parsers.choice import keeps_special_tokens, output_parser, reasoning_parser
from frontend.output_parsers.interface import OutputParser, ParserOptions, ToolSchema
from frontend.output_parsers.reasoning import ReasoningParser
from stepwire.errors import FieldViolation, InvalidRequestError
from stepwire.v1 import chat_service_pb2 as pb
from stepwire.v1 import common_pb2, generation_service_pb2

UNSUPPORTED = "UNSUPPORTED_FEATURE"


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat as a text generation, and how its text is to be read."""

    request: generation_service_pb2.GenerateRequest
    plan: ToolPlan
    tool_parser: str | None
    reasoning_parser: str | None
    is_reasoning_open: bool

    @property
    def has_tool_grammar(self) -> bool:
        """The constraint on the text was made of the tools, not given by the caller."""
        has_strict = self.plan.mode is ToolMode.AUTO and any(tool.is_strict for tool in self.plan.tools)
        return self.plan.is_enforced or has_strict

    def new_parser(self) -> OutputParser | None:
        """The parser of one choice; None when all text is content."""
        if self.plan.is_enforced:
            return EnforcedCalls(self.plan.named_function, _new_call_id)
        if self.tool_parser is None and self.reasoning_parser is None:
            return None
        return output_parser(
            ParserOptions(
                tool_parser=self.tool_parser,
                reasoning_parser=self.reasoning_parser,
                reasoning_open=self.is_reasoning_open,
                tool_call_id=_new_call_id,
                tools=tuple(ToolSchema(tool.name, tool.parameters) for tool in self.plan.tools),
            )
        )

    def new_reasoning(self) -> ReasoningParser | None:
        """One that finds the reasoning of a choice, and nothing else; None when there is none."""
        if self.reasoning_parser is None:
            return None
        return reasoning_parser(self.reasoning_parser, None, is_open=self.is_reasoning_open)


def prepare(request: pb.ChatRequest, model: ChatModel) -> PreparedChat:
    """Raises InvalidRequestError with every violation of the fields that GenerateRequest does not have."""
    try:
        checks = FieldChecks()
        plan = read_tools(request, checks)
        conversation = read_conversation(request, plan, checks)
        _check_support(request, plan, model, checks)
        checks.raise_if_any()
        prompt = render(read_template(request, model), conversation)
        constraint = _constraint(request, plan, model)
    except RecursionError as error:
        raise InvalidRequestError.of_field("tools", "a schema is nested too deeply") from error
    is_free = constraint is None or constraint.HasField("structural_tag")
    tool_parser = model.tool_parser if plan.mode is ToolMode.AUTO else None
    generate = _generate_request(request, prompt, constraint)
    if tool_parser is not None and not request.output.HasField("skip_special_tokens"):
        generate.output.skip_special_tokens = not keeps_special_tokens(tool_parser)
    return PreparedChat(
        generate,
        plan,
        tool_parser,
        # Text that a grammar shapes from its first token on has no reasoning in it.
        model.reasoning_parser if is_free and not prompt.is_reasoning_over else None,
        prompt.is_reasoning_open,
    )


def in_terms_of_chat(error: InvalidRequestError, prepared: PreparedChat) -> InvalidRequestError:
    """An error about the GenerateRequest, with the names that the fields have in ChatRequest."""
    names = {"text": "messages", "prompt": "messages"}
    if prepared.has_tool_grammar:
        names |= dict.fromkeys(("structured_output.json_schema", "structured_output.structural_tag"), "tools")
    return with_fields(
        error, (FieldViolation(names.get(item.field, item.field), item.description) for item in error.violations)
    )


def with_fields(error: InvalidRequestError, violations: Iterable[FieldViolation]) -> InvalidRequestError:
    """The same error about fields of other names."""
    renamed = tuple(violations)
    if not renamed:
        return error
    message = "; ".join(f"{item.field}: {item.description}" for item in renamed)
    return InvalidRequestError(message, reason=error.reason, violations=renamed, metadata=error.metadata)


def _check_support(request: pb.ChatRequest, plan: ToolPlan, model: ChatModel, checks: FieldChecks) -> None:
    if request.output.echo_prompt:
        checks.add("output.echo_prompt", "not for chats; RenderChat gives the prompt", reason=UNSUPPORTED)
    if request.output.HasField("prompt_logprobs"):
        checks.add("output.prompt_logprobs", "not for chats; RenderChat gives the prompt", reason=UNSUPPORTED)
    if plan.is_enforced and request.HasField("structured_output"):
        checks.add("structured_output", "tool_choice demands a call, which has a structure of its own")
    if plan.mode is not ToolMode.AUTO:
        return
    if model.tool_parser is None:
        text = "calls of this model are not understood among text; require a call, or name a function"
        checks.add("tool_choice", text, reason=UNSUPPORTED)
        return
    for index, tool in enumerate(plan.tools):
        if tool.is_strict and (problem := tool_grammar.refusal(model.tool_parser, tool)):
            text = f"{problem} in calls among text of parser {model.tool_parser}; require a call"
            checks.add(f"tools[{index}].strict", text, reason=UNSUPPORTED)
        elif tool.is_strict and request.HasField("structured_output"):
            checks.add("structured_output", f"tools[{index}].strict needs a structure of its own")


def _constraint(request: pb.ChatRequest, plan: ToolPlan, model: ChatModel) -> common_pb2.StructuredOutput | None:
    """What the text has to obey: the shape of the calls, or what the caller asks for."""
    match plan.mode:
        case ToolMode.REQUIRED:
            schema = tool_grammar.array_schema(plan.tools, is_parallel=plan.is_parallel)
            return common_pb2.StructuredOutput(json_schema=schema)
        case ToolMode.NAMED:
            return common_pb2.StructuredOutput(json_schema=tool_grammar.arguments_schema(plan.tools[0]))
        case ToolMode.AUTO if model.tool_parser and any(tool.is_strict for tool in plan.tools):
            tag = tool_grammar.structural_tag(model.tool_parser, plan.tools, is_parallel=plan.is_parallel)
            return common_pb2.StructuredOutput(structural_tag=tag)
    return request.structured_output if request.HasField("structured_output") else None


def _generate_request(
    request: pb.ChatRequest, prompt: RenderedPrompt, constraint: common_pb2.StructuredOutput | None
) -> generation_service_pb2.GenerateRequest:
    return generation_service_pb2.GenerateRequest(
        model=request.model,
        text=prompt.text,
        # The template has written them.
        add_special_tokens=False,
        sampling=request.sampling,
        stop=request.stop,
        output=request.output,
        structured_output=constraint,
        kv=request.kv,
        lora_name=request.lora_name,
        priority=request.priority,
        queue_timeout_ms=request.queue_timeout_ms if request.HasField("queue_timeout_ms") else None,
        resume_output_token_ids=request.resume_output_token_ids,
    )


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"
