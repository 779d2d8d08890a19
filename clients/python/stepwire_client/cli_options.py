"""Every command-line option, declared once with its help text; `cli_request` turns their values into a request.

Unset means "the model's default", never zero, so every optional number is None until the user gives one. Ranges are
checked by the server alone: it knows the model's limits, and its message names field, value and limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepwire_client import cli_input

DEFAULT_CONCURRENCY = 8

# What fits the proto field; the server checks what makes sense.
_UINT32 = 2**32 - 1
# Enough for an update of all engines behind an answer.
DEFAULT_MAX_RESUMES = 3

_SAMPLING = "Sampling"
_STOP = "When to stop"
_OUTPUT = "Output"
_STRUCTURE = "Structured output (one of these)"
_PROMPT = "Prompt and cache"
_CHAT = "Conversation"

Target = Annotated[str, typer.Option(parser=cli_input.text, help="host:port of the frontend.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Seconds until the server aborts the request.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON lines instead of text.")]
Model = Annotated[str, typer.Option(parser=cli_input.text, help="Served model; empty = the only one.")]

Prompt = Annotated[
    str | None, typer.Argument(parser=cli_input.text, help="Text to continue; - or nothing = standard input.")
]
File = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Many prompts: one a line, or .jsonl with a request an object."),
]
OutputFile = Annotated[Path | None, typer.Option("--output", help="With --file: where the JSON lines go.")]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1, max=256, show_default=str(DEFAULT_CONCURRENCY), help="With --file: requests in flight at once."
    ),
]
RequestId = Annotated[
    str, typer.Option(parser=cli_input.text, help="Id of the request; empty = the server assigns one.")
]

Temperature = Annotated[float | None, typer.Option(help="0 = greedy.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float | None, typer.Option(help="Nucleus, in (0, 1].", rich_help_panel=_SAMPLING)]
TopK = Annotated[
    int | None, typer.Option(min=-(2**31), max=2**31 - 1, help="Most likely k; 0 = off.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[float | None, typer.Option(help="Floor relative to the best token.", rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float | None, typer.Option(help="In [-2, 2].", rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float | None, typer.Option(help="In [-2, 2].", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 0; 1 = off.", rich_help_panel=_SAMPLING)]
Seed = Annotated[
    int | None, typer.Option(min=-1, max=2**63 - 1, help="Equal seeds repeat an answer.", rich_help_panel=_SAMPLING)
]
NumChoices = Annotated[
    int | None, typer.Option("-n", min=0, max=_UINT32, help="Independent choices.", rich_help_panel=_SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Bias of one token id; repeatable.", rich_help_panel=_SAMPLING),
]
AllowedTokenId = Annotated[
    list[int] | None,
    typer.Option(min=0, max=_UINT32, help="Sample only these ids; repeatable.", rich_help_panel=_SAMPLING),
]
BadWord = Annotated[
    list[str] | None,
    typer.Option(parser=cli_input.text, help="Never produce this; repeatable.", rich_help_panel=_SAMPLING),
]

MaxTokens = Annotated[int | None, typer.Option(min=0, max=_UINT32, help="Longest answer.", rich_help_panel=_STOP)]
MinTokens = Annotated[
    int | None, typer.Option(min=0, max=_UINT32, help="No stop of any kind before.", rich_help_panel=_STOP)
]
Stop = Annotated[
    list[str] | None, typer.Option(parser=cli_input.text, help="Stop string; repeatable.", rich_help_panel=_STOP)
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(min=0, max=_UINT32, help="Stop token id; repeatable.", rich_help_panel=_STOP)
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past end of sequence.", rich_help_panel=_STOP)]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="Keep the match.", rich_help_panel=_STOP)]
RepetitionDetection = Annotated[
    str | None,
    typer.Option(
        metavar="MAX:MIN:REPEATS",
        help="End when a pattern of MIN to MAX tokens comes REPEATS times in a row.",
        rich_help_panel=_STOP,
    ),
]

JsonSchema = Annotated[
    str | None,
    typer.Option(metavar="FILE|TEXT", help="Answer in JSON of this schema.", rich_help_panel=_STRUCTURE),
]
JsonObject = Annotated[
    bool, typer.Option("--json-object", help="Answer with a JSON object.", rich_help_panel=_STRUCTURE)
]
Regex = Annotated[str | None, typer.Option(help="Answer with a match of it.", rich_help_panel=_STRUCTURE)]
Grammar = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="EBNF grammar of the answer.", rich_help_panel=_STRUCTURE),
]
Choice = Annotated[
    list[str] | None, typer.Option(help="Answer with exactly this or another choice.", rich_help_panel=_STRUCTURE)
]
StructuralTag = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="JSON of a structural tag.", rich_help_panel=_STRUCTURE),
]

TokenIds = Annotated[bool, typer.Option("--token-ids", help="Also return token ids.", rich_help_panel=_OUTPUT)]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=-(2**31),
        max=2**31 - 1,
        metavar="K",
        help="Log-probability of each token and of the K most likely; -1 = of all.",
        rich_help_panel=_OUTPUT,
    ),
]
PromptLogprobs = Annotated[
    int | None,
    typer.Option(
        min=-(2**31), max=2**31 - 1, metavar="K", help="The same for the prompt's tokens.", rich_help_panel=_OUTPUT
    ),
]
LogprobTokenId = Annotated[
    list[int] | None,
    typer.Option(
        min=0, max=_UINT32, help="Also the log-probability of this id everywhere; repeatable.", rich_help_panel=_OUTPUT
    ),
]
Echo = Annotated[bool, typer.Option("--echo", help="Put the prompt in front.", rich_help_panel=_OUTPUT)]
WithTimings = Annotated[bool, typer.Option("--timings", help="Say where the time went.", rich_help_panel=_OUTPUT)]
SkipSpecialTokens = Annotated[bool | None, typer.Option(help="Default: skip.", rich_help_panel=_OUTPUT)]
MinChunkTokens = Annotated[
    int, typer.Option(min=0, max=_UINT32, help="Hold output back until so many.", rich_help_panel=_OUTPUT)
]
MaxChunkDelayMs = Annotated[
    int, typer.Option(min=0, max=_UINT32, help="But no longer than this.", rich_help_panel=_OUTPUT)
]

PromptTokenIds = Annotated[
    str | None, typer.Option(metavar="ID,ID,…", help="Prompt as token ids.", rich_help_panel=_PROMPT)
]
ResumeTokenIds = Annotated[
    str | None,
    typer.Option(metavar="ID,ID,…", help="Output a broken stream already gave.", rich_help_panel=_PROMPT),
]
AddSpecialTokens = Annotated[bool | None, typer.Option(help="Default: add.", rich_help_panel=_PROMPT)]
TruncatePromptTokens = Annotated[
    int | None,
    typer.Option(
        min=-(2**31), max=2**31 - 1, help="Keep the last k prompt tokens; -1 = what fits.", rich_help_panel=_PROMPT
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(min=-(2**31), max=2**31 - 1, help="Lower is served first; default 0.", rich_help_panel=_PROMPT),
]
ClientClass = Annotated[
    str, typer.Option(parser=cli_input.header, help="Whose share of the server it uses.", rich_help_panel=_PROMPT)
]
QueueTimeoutMs = Annotated[
    int | None, typer.Option(min=0, max=_UINT32, help="Longest wait for a turn.", rich_help_panel=_PROMPT)
]
MaxResumes = Annotated[
    int,
    typer.Option(min=0, help="How often an answer that breaks off, because its engine died, goes on. Of one choice."),
]
CacheSalt = Annotated[
    str, typer.Option(parser=cli_input.text, help="Separates the prefix cache.", rich_help_panel=_PROMPT)
]
BypassPrefixCache = Annotated[
    bool, typer.Option("--bypass-prefix-cache", help="Do not read it.", rich_help_panel=_PROMPT)
]

ChatPrompt = Annotated[
    str | None,
    typer.Argument(
        parser=cli_input.text, help="What you say; - = standard input, nothing = a conversation at the terminal."
    ),
]
System = Annotated[str, typer.Option(parser=cli_input.text, help="System message.", rich_help_panel=_CHAT)]
Tools = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="JSON array of functions, each {name, description, parameters, strict}, or as OpenAI writes them.",
        rich_help_panel=_CHAT,
    ),
]
ToolChoice = Annotated[
    str | None,
    typer.Option(
        parser=cli_input.text,
        metavar="auto|none|required|NAME",
        help="May or must the model call a function?",
        rich_help_panel=_CHAT,
    ),
]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='For the template, e.g. {"enable_thinking": false}.', rich_help_panel=_CHAT),
]
