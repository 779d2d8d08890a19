"""The `stepwire` command: generate, chat, embed, tokenize, models, health, bench, top, report, size, admin.

Exit codes: 0 done, 1 the server refused or failed, 2 wrong usage, 130 interrupted (which aborts what was running).
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from stepwire_client import (
    cli_admin,
    cli_bench,
    cli_chat,
    cli_credentials,
    cli_embed,
    cli_generate,
    cli_input,
    cli_printing,
    cli_report,
    cli_size,
    cli_top,
)
from stepwire_client import cli_options as opt
from stepwire_client.cli_session import FAILED, connected
from stepwire_client.short_calls import DEFAULT_TARGET, GENERATION_SERVICE

app = typer.Typer(
    help="Command-line client of a stepwire server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.callback()(cli_credentials.remember)
app.command()(cli_generate.generate)
app.command()(cli_chat.chat)
app.command()(cli_embed.embed)
app.command()(cli_bench.bench)
app.command()(cli_top.top)
app.command("report")(cli_report.report_command)
app.command("size")(cli_size.size_command)
app.add_typer(cli_admin.app, name="admin")

Texts = Annotated[
    list[str] | None, typer.Argument(parser=cli_input.text, help="Texts to encode; nothing = standard input.")
]
Offsets = Annotated[bool, typer.Option("--offsets", help="Also show character offsets.")]


@app.command()
def tokenize(
    texts: Texts = None,
    target: opt.Target = DEFAULT_TARGET,
    model: opt.Model = "",
    add_special_tokens: opt.AddSpecialTokens = None,
    offsets: Offsets = False,
    json: opt.Json = False,
) -> None:
    """Encode texts exactly as the server does."""
    to_encode = texts or [cli_input.read_stdin("no text: give one, or pipe one in")]
    with connected(target) as client:
        response = client.tokenize(
            to_encode,
            model=model,
            add_special_tokens=add_special_tokens is not False,
            return_offsets=offsets,
        )
        if json:
            cli_printing.write_json(response)
            return
        for encoding in response.encodings:
            cli_printing.write_text(" ".join(map(str, encoding.token_ids)) + "\n")
            if offsets:
                spans = zip(encoding.offset_starts, encoding.offset_ends, strict=True)
                cli_printing.write_text(" ".join(f"{start}-{end}" for start, end in spans) + "\n")
            cli_printing.note(f"{len(encoding.token_ids)} tokens, the model takes {response.max_model_len}")


@app.command()
def models(target: opt.Target = DEFAULT_TARGET, json: opt.Json = False) -> None:
    """List what the server serves."""
    with connected(target) as client:
        served = client.models()
        if json:
            for model in served:
                cli_printing.write_json(model)
            return
        table = Table(Column("model", overflow="fold"), "context", "vocabulary", "architecture", "dtype", "revision")
        for model in served:
            sizes = (str(model.max_model_len), str(model.vocab_size))
            table.add_row(model.id, *sizes, model.architecture, model.dtype, model.revision)
        Console().print(table)


@app.command()
def health(target: opt.Target = DEFAULT_TARGET) -> None:
    """Say whether the server answers requests; exit 0 when it does."""
    with connected(target) as client:
        is_serving = client.health()
        cli_printing.write_text(f"{GENERATION_SERVICE}: {'SERVING' if is_serving else 'NOT_SERVING'}\n")
    if not is_serving:
        raise typer.Exit(FAILED)


def main() -> None:
    """Entry point of the `stepwire` script."""
    app()


if __name__ == "__main__":
    main()
