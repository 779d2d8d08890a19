"""`stepwire generate`: one prompt streamed to the terminal, or a file of prompts answered as JSON lines."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import typer

from stepwire.v1 import generation_service_pb2
from stepwire_client import cli_batch, cli_input, cli_options, cli_printing, cli_request
from stepwire_client.call_facts import CallFacts
from stepwire_client.cli_session import FAILED, connected
from stepwire_client.client import Client
from stepwire_client.short_calls import DEFAULT_TARGET


def generate(
    ctx: typer.Context,
    prompt: cli_options.Prompt = None,
    prompt_token_ids: cli_options.PromptTokenIds = None,
    file: cli_options.File = None,
    output: cli_options.OutputFile = None,
    concurrency: cli_options.Concurrency = None,
    target: cli_options.Target = DEFAULT_TARGET,
    timeout: cli_options.Timeout = None,
    max_resumes: cli_options.MaxResumes = cli_options.DEFAULT_MAX_RESUMES,
    json: cli_options.Json = False,
    model: cli_options.Model = "",
    request_id: cli_options.RequestId = "",
    temperature: cli_options.Temperature = None,
    top_p: cli_options.TopP = None,
    top_k: cli_options.TopK = None,
    min_p: cli_options.MinP = None,
    presence_penalty: cli_options.PresencePenalty = None,
    frequency_penalty: cli_options.FrequencyPenalty = None,
    repetition_penalty: cli_options.RepetitionPenalty = None,
    seed: cli_options.Seed = None,
    n: cli_options.NumChoices = None,
    logit_bias: cli_options.LogitBias = None,
    allowed_token_id: cli_options.AllowedTokenId = None,
    bad_word: cli_options.BadWord = None,
    max_tokens: cli_options.MaxTokens = None,
    min_tokens: cli_options.MinTokens = None,
    stop: cli_options.Stop = None,
    stop_token_id: cli_options.StopTokenId = None,
    ignore_eos: cli_options.IgnoreEos = False,
    include_stop: cli_options.IncludeStop = False,
    repetition_detection: cli_options.RepetitionDetection = None,
    json_schema: cli_options.JsonSchema = None,
    json_object: cli_options.JsonObject = False,
    regex: cli_options.Regex = None,
    grammar: cli_options.Grammar = None,
    choice: cli_options.Choice = None,
    structural_tag: cli_options.StructuralTag = None,
    token_ids: cli_options.TokenIds = False,
    logprobs: cli_options.Logprobs = None,
    prompt_logprobs: cli_options.PromptLogprobs = None,
    logprob_token_id: cli_options.LogprobTokenId = None,
    echo: cli_options.Echo = False,
    timings: cli_options.WithTimings = False,
    skip_special_tokens: cli_options.SkipSpecialTokens = None,
    min_chunk_tokens: cli_options.MinChunkTokens = 0,
    max_chunk_delay_ms: cli_options.MaxChunkDelayMs = 0,
    resume_token_ids: cli_options.ResumeTokenIds = None,
    add_special_tokens: cli_options.AddSpecialTokens = None,
    truncate_prompt_tokens: cli_options.TruncatePromptTokens = None,
    priority: cli_options.Priority = None,
    client_class: cli_options.ClientClass = "",
    queue_timeout_ms: cli_options.QueueTimeoutMs = None,
    cache_salt: cli_options.CacheSalt = "",
    bypass_prefix_cache: cli_options.BypassPrefixCache = False,
) -> None:
    """Continue a prompt and stream the answer; with --file, answer many prompts."""
    cli_request.check_combination(ctx.params)
    request = cli_request.build(ctx.params)
    with connected(target, timeout, client_class) as client:
        if file is not None:
            _generate_file(client, request, file, output, concurrency or cli_options.DEFAULT_CONCURRENCY, timeout)
        else:
            text = None if prompt_token_ids is not None else _read_prompt(prompt)
            cli_request.set_prompt(request, text, prompt_token_ids)
            _generate_one(client, request, timeout, max_resumes, json)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    return cli_input.read_stdin("no prompt: give a text, pipe one in, or use --file")


def _generate_one(
    client: Client,
    request: generation_service_pb2.GenerateRequest,
    timeout: float | None,
    max_resumes: int,
    json: bool,
) -> None:
    num_choices, facts = max(1, request.sampling.n), CallFacts()
    # Several choices can not go on.
    limit = max_resumes if num_choices == 1 else 0
    events = client.generate_stream(request, timeout_s=timeout, max_resumes=limit, facts=facts)
    if json:
        for event in events:
            cli_printing.write_json(event)
    else:
        cli_printing.print_stream(events, num_choices, facts)


def _generate_file(
    client: Client,
    template: generation_service_pb2.GenerateRequest,
    file: Path,
    output: Path | None,
    concurrency: int,
    timeout: float | None,
) -> None:
    requests = cli_batch.read_requests(file, template)
    with nullcontext(sys.stdout) if output is None else cli_input.open_output(output) as stream:
        num_failed = cli_batch.run(client, requests, stream, concurrency, timeout)
    if num_failed:
        cli_printing.note(f"error: {num_failed} of {len(requests)} requests failed", style="bold red")
        raise typer.Exit(FAILED)
