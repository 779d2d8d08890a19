"""ChatRequest in, a conversation to render out: the fields that speak of the template. Pure."""

from __future__ import annotations

from frontend.chat.messages import read_messages
from frontend.chat.model import ChatModel
from frontend.chat.rendering import Conversation
from frontend.chat.struct_values import to_dict
from frontend.chat.tools import ToolPlan
from frontend.chat_template import OWN_VARIABLES, ChatTemplate
from frontend.input_processor.field_checks import FieldChecks
from stepwire.errors import InvalidRequestError
from stepwire.v1 import chat_service_pb2 as pb

MAX_TEMPLATE_CHARS = 256 * 1024


def read_conversation(request: pb.ChatRequest, plan: ToolPlan, checks: FieldChecks) -> Conversation:
    """What is wrong goes to `checks`, and the result is then not to be used."""
    messages = read_messages(list(request.messages), checks)
    variables = to_dict(request.chat_template_kwargs, "chat_template_kwargs", checks)
    for name in OWN_VARIABLES:
        checks.require(name not in variables, f"chat_template_kwargs.{name}", "the server sets this variable")
    is_continued = request.continue_final_message
    if is_continued:
        _check_continued(request, checks)
    is_prompted = request.add_generation_prompt if request.HasField("add_generation_prompt") else not is_continued
    tools = [tool.for_template() for tool in plan.tools]
    return Conversation(messages, tools, variables, is_prompted, is_continued)


def read_template(request: pb.ChatRequest, model: ChatModel) -> ChatTemplate:
    """The model's, or that of the caller if the operator allows it. Raises InvalidRequestError."""
    source = request.chat_template
    if not source:
        return model.template
    if not model.allows_request_template:
        raise InvalidRequestError.of_field(
            "chat_template", "this server takes no templates from callers", reason="CHAT_TEMPLATE_NOT_ALLOWED"
        )
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError.of_field(
            "chat_template", f"{len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed"
        )
    return model.template.with_source(source, is_callers=True)


def _check_continued(request: pb.ChatRequest, checks: FieldChecks) -> None:
    checks.require(
        not request.add_generation_prompt,
        "add_generation_prompt",
        "continue_final_message is set, and a message cannot both begin and go on",
    )
    last = request.messages[-1] if request.messages else pb.Message()
    is_answer = last.role == pb.ROLE_ASSISTANT and bool(last.content) and not last.tool_calls
    checks.require(
        is_answer, "continue_final_message", "the last message is not one of the assistant with text and without calls"
    )
