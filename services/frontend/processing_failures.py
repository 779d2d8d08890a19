"""Which stage an output failed in; the log has it in full once, as it has every fault (`stepwire.repeats`)."""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Mapping

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


def note_failure(error: Exception, log_fields: Mapping[str, str]) -> Stage:
    """Log it with the fields of its request, and say where it belongs. `error` has been raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = {str(frame.f_globals.get("__name__", "")) for frame in frames}
    stage = _stage_of(modules)
    logger.error("output processing failed", exc_info=error, extra={**log_fields, "stage": stage.value})
    return stage


def _stage_of(modules: set[str]) -> Stage:
    """By the modules that an error has come through."""
    if _PARSER_MODULE in modules:
        return Stage.PARSER
    return Stage.LOGPROBS if modules & _LOGPROBS_MODULES else Stage.DETOKENIZE
