"""Which stage an output failed in, and how much of it the log gets.

One for each output processor; the event loop only.
"""

from __future__ import annotations

import enum
import logging
import traceback
from collections import Counter

logger = logging.getLogger(__name__)

_LOGPROBS_MODULES = frozenset({"frontend.logprobs", "stepwire.packed_logprobs"})
# What feeds the parsers, whichever it is.
_PARSER_MODULE = "frontend.chat.answer"


class Stage(enum.Enum):
    """What is made of an output; the label of the metric. What no other stage has to do with is about text."""

    DETOKENIZE = "detokenize"
    LOGPROBS = "logprobs"
    # Content, reasoning and tool calls told apart.
    PARSER = "parser"


class ProcessingFailures:
    """Logs the first failure of a type and place in full; of the others a line, or one fault fills the disk."""

    def __init__(self) -> None:
        # No larger than the program: places are lines of it.
        self._seen: Counter[tuple[str, str]] = Counter()

    def note(self, error: Exception, request_id: str) -> Stage:
        """Log it and say where it belongs. `error` has been raised."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = {str(frame.f_globals.get("__name__", "")) for frame in frames}
        stage = _stage_of(modules)
        key = (type(error).__name__, _place(error))
        self._seen[key] += 1
        num_seen = self._seen[key]
        facts = {"request_id": request_id, "stage": stage.value}
        if num_seen == 1:
            logger.error("output processing failed", exc_info=error, extra=facts)
        else:
            name, place = key
            logger.error("output processing failed again: %s at %s, %d times", name, place, num_seen, extra=facts)
        return stage


def _stage_of(modules: set[str]) -> Stage:
    """By the modules that an error has come through."""
    if _PARSER_MODULE in modules:
        return Stage.PARSER
    return Stage.LOGPROBS if modules & _LOGPROBS_MODULES else Stage.DETOKENIZE


def _place(error: Exception) -> str:
    """Where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"
