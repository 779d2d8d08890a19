"""The families whose calls can be enforced among free text: what each one's text may be. Pure.

An answer cannot have the mark of a family's calls in it but in front of a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from frontend.chat import parameter_tags
from frontend.chat.call_formats import (
    Family,
    Format,
    arguments,
    call_object,
    const,
    one_of,
    optional,
    regex,
    sequence,
    star,
    text,
)
from frontend.chat.tools import Tool

_HERMES_MARKS = ("<tool_call>", "</tool_call>")
_MISTRAL_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
# Behind each of them the parser looks for a call.
_PYTHON_TAG, _TURN_ENDS = "<|python_tag|>", ("<|eom_id|>", "<|eot_id|>")
_THINK_END = "</think>"
# What an answer of llama3_json may have in front.
_SPACES = (" ", "\n", "\n\n")
# What Python takes for white space, which the parser skips before a call.
_SPACE = r"\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


def _hermes(tools: Sequence[Tool], is_parallel: bool) -> Format:
    begin, end = _HERMES_MARKS
    tags = [
        {
            "begin": f'{begin}\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "content": arguments(tool),
            "end": f"}}\n{end}",
        }
        for tool in tools
    ]
    return {
        "type": "triggered_tags",
        "triggers": [begin],
        "tags": tags,
        "stop_after_first": not is_parallel,
    }


def _mistral(tools: Sequence[Tool], is_parallel: bool) -> Format:
    """An array behind the mark, or a mark before each name: models of one family differ by their age."""
    mark, call_id, args = _MISTRAL_MARKS
    one = one_of([call_object(tool, "arguments") for tool in tools])
    more = (star(sequence(regex(", ?"), one)),) if is_parallel else ()
    array = sequence(const("["), one, *more, const("]"))
    marks = optional(sequence(optional(sequence(const(call_id), regex("[A-Za-z0-9]{1,64}"))), const(args)))
    named = [sequence(const(tool.name), marks, arguments(tool)) for tool in tools]
    calls = sequence(const(mark), optional(const(" ")), one_of([array, *named]))
    free = text(mark)
    return sequence(free, star(sequence(calls, free)) if is_parallel else optional(calls))


def _llama3_json(tools: Sequence[Tool], is_parallel: bool) -> Format:
    """An answer that begins with a brace is calls, and so is what follows a tag; behind calls nothing is said.

    Nor can an answer begin with "<" and a sign that could make it a tag, or the end of reasoning. Behind reasoning
    the answer begins anew.
    """
    one = one_of([call_object(tool, "parameters") for tool in tools])
    calls = sequence(one, star(sequence(const("; "), one))) if is_parallel else one
    tagged = sequence(const(_PYTHON_TAG), calls)
    begin = regex(rf"[^{_SPACE}{{<]|<[^<|/]")
    said = sequence(begin, text(_PYTHON_TAG, *_TURN_ENDS, _THINK_END), optional(tagged))
    begun = one_of([said, calls, tagged])
    # Behind a part that may be empty the library would look at each token by itself, while the step loop waits.
    answer = optional(one_of([begun, *(sequence(const(space), begun) for space in _SPACES)]))
    return sequence(answer, optional(sequence(const(_THINK_END), answer)))


FAMILIES = {
    "hermes": Family(_hermes, _HERMES_MARKS),
    "llama3_json": Family(_llama3_json, (_PYTHON_TAG,)),
    "mistral": Family(_mistral, _MISTRAL_MARKS),
    "qwen3_coder": Family(parameter_tags.tagged_calls, _HERMES_MARKS, parameter_tags.refusal),
}
