"""The sample answer, and how to send the next request."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from stepwire.v1 import common_pb2, generation_service_pb2
from stepwire_client import Client

NUM_TOKENS = 48
TIMEOUT_S = 120.0
NEXT_PROMPT = "Once upon a time"
METHOD = "stepwire.v1.GenerationService/GenerateStream"


def sample_request(prompt: str) -> generation_service_pb2.GenerateRequest:
    """Greedy, so that every run shows the same answer."""
    return generation_service_pb2.GenerateRequest(
        text=prompt,
        sampling=common_pb2.SamplingParams(temperature=0.0),
        stop=common_pb2.StopConditions(max_tokens=NUM_TOKENS),
    )


def stream(client: Client, prompt: str, console: Console) -> None:
    """Show the prompt and, as it comes, its continuation."""
    console.print(prompt, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
    for event in client.generate_stream(sample_request(prompt), timeout_s=TIMEOUT_S):
        console.print(event.delta.text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()


def print_next_steps(target: str, admin_target: str, metrics: Sequence[str], console: Console) -> None:
    """Commands that work as they stand."""
    console.print("\nSend the next request:", style="bold")
    for line in (cli_line(target), grpcurl_line(target)):
        console.print("  " + line, markup=False, highlight=False, soft_wrap=True)
    console.print("\nLook after the engine:", style="bold")
    for line in (admin_line(admin_target), top_line(metrics)):
        console.print("  " + line, markup=False, highlight=False, soft_wrap=True)
    console.print("\nCtrl-C stops the services.", style="dim")


def cli_line(target: str) -> str:
    """With the `stepwire` command, which lies beside the Python that runs this."""
    return shlex.join([_command(), "generate", NEXT_PROMPT, "--max-tokens", "64", "--target", target])


def admin_line(target: str) -> str:
    """The state of the engine, on the frontend's admin port."""
    return shlex.join([_command(), "admin", "dump-state", "--target", target])


def top_line(metrics: Sequence[str]) -> str:
    """The services live; `metrics` are their metrics ports."""
    return shlex.join([_command(), "top", *metrics])


def _command() -> str:
    command = Path(sys.executable).with_name("stepwire")
    return str(command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command)


def grpcurl_line(target: str) -> str:
    """With grpcurl, which learns the messages by reflection."""
    body = json.dumps({"text": NEXT_PROMPT, "stop": {"max_tokens": 64}})
    return shlex.join(["grpcurl", "-plaintext", "-d", body, target, METHOD])
