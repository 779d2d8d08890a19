"""Option values of `stepwire chat` -> ChatRequest. Pure but for the file of tools; bad values are usage errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from google.protobuf import json_format
from google.protobuf.message import Message

from stepwire.v1 import chat_service_pb2 as pb
from stepwire.v1 import common_pb2
from stepwire_client import cli_input, cli_structured_output

_MODES = {"auto": pb.ToolChoice.MODE_AUTO, "none": pb.ToolChoice.MODE_NONE, "required": pb.ToolChoice.MODE_REQUIRED}
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "seed")

Options = Mapping[str, Any]


def build(options: Options) -> pb.ChatRequest:
    """The request without what the user says. `options` are the parameters of the command by name."""
    given = {name: value for name, value in options.items() if value is not None}
    request = pb.ChatRequest(
        model=options["model"],
        sampling=common_pb2.SamplingParams(**{name: given[name] for name in _SAMPLING_FIELDS if name in given}),
        stop=common_pb2.StopConditions(max_tokens=options["max_tokens"], stop=options["stop"] or ()),
        output=common_pb2.OutputOptions(timings=options["timings"]),
        tools=_tools(options["tools"]),
    )
    if options["system"]:
        request.messages.append(said(pb.ROLE_SYSTEM, options["system"]))
    if options["tool_choice"] is not None:
        request.tool_choice.CopyFrom(_tool_choice(options["tool_choice"]))
    if options["template_kwargs"] is not None:
        _parse("--template-kwargs", options["template_kwargs"], request.chat_template_kwargs)
    if options["json_schema"] is not None:
        request.structured_output.json_schema = cli_structured_output.read_schema(options["json_schema"])
    return request


def said(role: pb.Role.ValueType, text: str) -> pb.Message:
    """One turn of text."""
    return pb.Message(role=role, content=[pb.ContentPart(text=text)])


def _tool_choice(value: str) -> pb.ToolChoice:
    if value in _MODES:
        return pb.ToolChoice(mode=_MODES[value])
    return pb.ToolChoice(function_name=value)


def _tools(file: Path | None) -> list[pb.Tool]:
    if file is None:
        return []
    try:
        given = json.loads(cli_input.read_file(file))
    except ValueError as error:
        raise typer.BadParameter(f"{file}: not JSON: {error}") from error
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise typer.BadParameter(f"{file}: not a JSON array of functions")
    functions = [tool.get("function", tool) for tool in given]
    if not all(isinstance(function, dict) for function in functions):
        raise typer.BadParameter(f"{file}: a function is not an object")
    return [_tool(function) for function in functions]


def _tool(given: dict[str, Any]) -> pb.Tool:
    # As text, because that keeps the order of the schema's keys.
    fields = {**given, "parameters_json": json.dumps(given.get("parameters", {}), ensure_ascii=False)}
    fields.pop("parameters", None)
    tool = pb.Tool()
    _parse("--tools", json.dumps(fields), tool)
    return tool


def _parse(flag: str, text: str, message: Message) -> None:
    try:
        json_format.Parse(text, message)
    except json_format.ParseError as error:
        raise typer.BadParameter(f"{flag}: {error}") from error
