"""What the scheduler knows of a grammar: when its request may run, and what each sampled token means to it.

Pure. The grammar itself is the business of `engine_core.structured_output`; the scheduler sees this interface only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine_core.scheduler.request_error import RequestError

# Names of the fields of StructuredOutput.spec on the wire.
GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint as it was asked for. `kind` is one of GRAMMAR_KINDS.

    `text` is that field's text; of `choice` the JSON array of the choices, of `json_object` nothing.
    """

    kind: str
    text: str


class Grammar(Protocol):
    """The constraint on one request's output. It has seen the request's output tokens, and survives preemption."""

    @property
    def is_ready(self) -> bool:
        """Compiled, and advanced over resumed output. Until then, and after an error, the request is not scheduled."""

    @property
    def error(self) -> RequestError | None:
        """Why it will never be ready: what is wrong with the constraint, or with those of others, for the caller."""

    @property
    def is_terminated(self) -> bool:
        """Nothing may follow: its end was reached, and was said with an end-of-sequence token if there is one."""

    def accept(self, token_id: int) -> bool:
        """Take in the next output token; False when the grammar refuses it."""
