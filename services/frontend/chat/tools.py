"""Tools and tool choice of a ChatRequest: what the model is told of, and what it may or must call. Pure."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import Any

from frontend.chat.struct_values import to_dict
from frontend.input_processor.field_checks import FieldChecks
from stepwire.v1 import chat_service_pb2 as pb

MAX_TOOLS = 128
# All schemas of a request, in characters of JSON: each is shown to the model, and may become a grammar.
MAX_SCHEMA_CHARS = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class ToolMode(enum.Enum):
    """What the caller wants of the tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    # One function, with nothing said around its arguments.
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]
    is_strict: bool

    def for_template(self) -> dict[str, Any]:
        """The shape that templates are written for."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools in force: none with NONE, the one that must be called with NAMED."""

    mode: ToolMode = ToolMode.NONE
    tools: tuple[Tool, ...] = ()
    is_parallel: bool = True

    @property
    def is_enforced(self) -> bool:
        """The answer is calls and nothing else, by grammar."""
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

    @property
    def named_function(self) -> str | None:
        """The one function whose arguments are the whole answer."""
        return self.tools[0].name if self.mode is ToolMode.NAMED else None


def read_tools(request: pb.ChatRequest, checks: FieldChecks) -> ToolPlan:
    """What is wrong goes to `checks`, and the result is then not to be used."""
    tools = _read_tools(request, checks)
    mode, name = _read_choice(request, checks)
    if mode is ToolMode.NONE:
        return ToolPlan()
    if mode is ToolMode.NAMED:
        tools = tuple(tool for tool in tools if tool.name == name)
        checks.require(bool(tools), "tool_choice.function_name", "no tool has this name")
    elif mode is ToolMode.REQUIRED:
        checks.require(bool(request.tools), "tool_choice.mode", "a call is required and there are no tools")
    is_parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True
    return ToolPlan(mode, tools, is_parallel)


def _read_choice(request: pb.ChatRequest, checks: FieldChecks) -> tuple[ToolMode, str]:
    """Without a choice the model chooses, if there are tools."""
    automatic = ToolMode.AUTO if request.tools else ToolMode.NONE
    if not request.HasField("tool_choice"):
        return automatic, ""
    choice = request.tool_choice
    kind = choice.WhichOneof("choice")
    if kind == "function_name":
        return ToolMode.NAMED, choice.function_name
    modes = {
        pb.ToolChoice.MODE_AUTO: automatic,
        pb.ToolChoice.MODE_NONE: ToolMode.NONE,
        pb.ToolChoice.MODE_REQUIRED: ToolMode.REQUIRED,
    }
    if kind is None:
        checks.add("tool_choice.choice", "neither mode nor function_name is set")
    elif choice.mode not in modes:
        checks.add("tool_choice.mode", f"{choice.mode} is no mode")
    return modes.get(choice.mode, ToolMode.NONE), ""


def _read_tools(request: pb.ChatRequest, checks: FieldChecks) -> tuple[Tool, ...]:
    count = len(request.tools)
    if not checks.require(count <= MAX_TOOLS, "tools", f"{count} tools, at most {MAX_TOOLS} are allowed"):
        return ()
    # Parsing holds the interpreter, so sizes come first.
    if not _check_size(sum(len(given.parameters_json) for given in request.tools), checks):
        return ()
    tools: dict[str, Tool] = {}
    num_chars = 0
    for index, given in enumerate(request.tools):
        field = f"tools[{index}]"
        is_name = _NAME.fullmatch(given.name) is not None
        checks.require(is_name, f"{field}.name", "1 to 64 letters, digits, _, . and - are allowed")
        checks.require(given.name not in tools, f"{field}.name", "another tool has this name")
        parameters = _read_parameters(given, field, checks)
        num_chars += len(json.dumps(parameters))
        tools[given.name] = Tool(given.name, given.description, parameters, given.strict)
    _check_size(num_chars, checks)
    return tuple(tools.values())


def _check_size(num_chars: int, checks: FieldChecks) -> bool:
    limit = f"{num_chars} characters of schemas, at most {MAX_SCHEMA_CHARS} are allowed"
    return checks.require(num_chars <= MAX_SCHEMA_CHARS, "tools", limit)


def _read_parameters(given: pb.Tool, field: str, checks: FieldChecks) -> dict[str, Any]:
    if given.parameters_json:
        field = f"{field}.parameters_json"
        checks.require(not given.HasField("parameters"), field, "parameters is set as well")
        parameters = _parse(given.parameters_json)
    else:
        field = f"{field}.parameters"
        parameters = to_dict(given.parameters, field, checks) or _NO_PARAMETERS
    is_object = isinstance(parameters, dict) and parameters.get("type", "object") == "object"
    if not checks.require(is_object, field, "not the JSON schema of an object"):
        return _NO_PARAMETERS
    return {"type": "object", **parameters}


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    """NaN and infinities, which Python's parser takes for numbers."""
    raise ValueError(f"{name} is not JSON")
