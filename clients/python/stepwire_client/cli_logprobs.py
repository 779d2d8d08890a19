"""Log-probabilities for people: one line a token, on standard error like everything that is about the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepwire.v1 import common_pb2

# The rest of a line with twenty of them would be read by nobody; `--json` has them all.
_MAX_SHOWN = 5


def print_logprobs(title: str, rows: Sequence[common_pb2.TokenLogprobs]) -> None:
    """A table of the rows; nothing when there are none."""
    if not rows:
        return
    table = Table("token", "id", "log-probability", "rank", title=title, title_justify="left")
    has_top = any(row.top for row in rows)
    if has_top:
        table.add_column("most likely", overflow="fold")
    for row in rows:
        cells: list[str | Text] = [*_own(row), *([_top(row.top)] if has_top else [])]
        # As text: a token may look like markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    Console(stderr=True, highlight=False).print(table)


def _own(row: common_pb2.TokenLogprobs) -> tuple[str, str, str, str]:
    if not row.HasField("sampled"):
        return "(first)", "", "", ""
    own = row.sampled
    return show(own.token_bytes), str(own.token_id), f"{own.logprob:.4f}", str(own.rank)


def _top(entries: Iterable[common_pb2.Logprob]) -> str:
    shown = [f"{show(entry.token_bytes)} {entry.logprob:.2f}" for entry in entries]
    return "  ".join(shown[:_MAX_SHOWN]) + ("  …" if len(shown) > _MAX_SHOWN else "")


def show(token_bytes: bytes) -> str:
    """Bytes in quotes, with escapes where they are no printable text."""
    text = token_bytes.decode("utf-8", "backslashreplace")
    return '"' + "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text) + '"'
