"""The commands that the documentation shows: blocks and inline spans, cut into words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkout import ROOT

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "operations").glob("*.md"),
        *(ROOT / "clients").glob("**/README.md"),
        ROOT / "k8s" / "README.md",
        ROOT / "bench" / "README.md",
    ]
)
_BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SEPARATORS = "|&;()<>\n"


@dataclass(frozen=True)
class Command:
    """`program` without its directory; of `python -m module` it is the module."""

    page: Path
    program: str
    args: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.program} {' '.join(self.args)}"

    @property
    def flags(self) -> list[str]:
        """Names of its flags up to a `--`, behind which they are another program's."""
        own = self.args[: self.args.index("--")] if "--" in self.args else self.args
        return [word.partition("=")[0] for word in own if re.match(r"--?[a-zA-Z]", word)]


def commands() -> list[Command]:
    """All of all pages, in order."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [shown for language, shown in _BLOCK.findall(text) if language in ("", "sh")]
        for shown in (*blocks, *_SPAN.findall(_BLOCK.sub("", text))):
            found += [command for words in _lines(shown) if (command := _command(page, words))]
    return found


def _lines(text: str) -> Iterator[list[str]]:
    """Simple commands, without redirections; what is no shell at all ends the search."""
    text = re.sub(r"(?m)\s#\s.*$", "", text.replace("\\\n", " "))
    words = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    words.whitespace, words.commenters, words.whitespace_split = " \t\r", "", True
    line: list[str] = []
    try:
        for word in words:
            if set(word) <= set(_SEPARATORS):
                yield line
                line = []
            else:
                # [--flag] is one that may be left out.
                line.append(word.strip("[]"))
    except ValueError:
        return
    yield line


def _command(page: Path, words: list[str]) -> Command | None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        return None
    program, args = Path(words[0]).name, words[1:]
    if re.fullmatch(r"python3?", program) and args[:1] == ["-m"] and len(args) > 1:
        program, args = args[1], args[2:]
    return Command(page, program, tuple(args))
