"""`stepwire chat`: one question answered, or a conversation at the terminal; answers are streamed."""

from __future__ import annotations

import sys

import typer

from stepwire.v1 import chat_service_pb2 as pb
from stepwire_client import cli_chat_printing, cli_chat_request, cli_input, cli_options, cli_printing
from stepwire_client.call_facts import CallFacts
from stepwire_client.cli_session import connected
from stepwire_client.client import Client
from stepwire_client.short_calls import DEFAULT_TARGET


def chat(
    ctx: typer.Context,
    prompt: cli_options.ChatPrompt = None,
    system: cli_options.System = "",
    tools: cli_options.Tools = None,
    tool_choice: cli_options.ToolChoice = None,
    template_kwargs: cli_options.TemplateKwargs = None,
    target: cli_options.Target = DEFAULT_TARGET,
    timeout: cli_options.Timeout = None,
    max_resumes: cli_options.MaxResumes = cli_options.DEFAULT_MAX_RESUMES,
    json: cli_options.Json = False,
    model: cli_options.Model = "",
    temperature: cli_options.Temperature = None,
    top_p: cli_options.TopP = None,
    top_k: cli_options.TopK = None,
    seed: cli_options.Seed = None,
    max_tokens: cli_options.MaxTokens = None,
    stop: cli_options.Stop = None,
    json_schema: cli_options.JsonSchema = None,
    timings: cli_options.WithTimings = False,
    client_class: cli_options.ClientClass = "",
) -> None:
    """Talk to the model: one question, or line by line at the terminal, where an empty line is no turn."""
    request = cli_chat_request.build(ctx.params)
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        with connected(target, timeout, client_class) as client:
            _converse(client, request, timeout, max_resumes, json)
        return
    question = prompt if prompt not in (None, "-") else cli_input.read_stdin("no question: give one, or pipe one in")
    with connected(target, timeout, client_class) as client:
        _turn(client, request, str(question), timeout, max_resumes, json)


def _converse(client: Client, request: pb.ChatRequest, timeout: float | None, max_resumes: int, json: bool) -> None:
    """Until the end of the input, or Ctrl-C."""
    while True:
        cli_printing.aside("> ")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            _turn(client, request, line.strip(), timeout, max_resumes, json)


def _turn(
    client: Client, request: pb.ChatRequest, text: str, timeout: float | None, max_resumes: int, json: bool
) -> None:
    """Ask, show the answer, and keep both in the conversation."""
    request.messages.append(cli_chat_request.said(pb.ROLE_USER, text))
    facts = CallFacts()
    events = client.chat_stream(request, timeout_s=timeout, max_resumes=max_resumes, facts=facts)
    request.messages.append(cli_chat_printing.print_chat(events, facts, json=json))
