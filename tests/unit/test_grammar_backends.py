"""Special tokens in a structural tag: those it names can be written, by a vocabulary where they have text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xgrammar

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.structured_output.backends import MAX_SPELLING, Backends
from engine_core.structured_output.grammar_text import compile_spec
from engine_core.structured_output.vocabulary import Vocabulary, read_vocabulary
from fakes.small_tokenizer import byte_level_backend, write_model_dir

MARK, OTHER = 256, 257
VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), b"", b""), {"<mark>": MARK, "<other>": OTHER})
FORMAT = {"type": "triggered_tags", "triggers": ["<mark>"], "tags": [
    {"begin": "<mark>", "content": {"type": "const_string", "value": "yes"}, "end": "!"}
]}  # fmt: skip


def tag(special_tokens: object) -> GrammarSpec:
    named = {"type": "structural_tag", "format": FORMAT, "special_tokens": special_tokens}
    return GrammarSpec("structural_tag", json.dumps(named))


def accepted(spec: GrammarSpec, token_ids: list[int]) -> bool:
    compiled = compile_spec(Backends(VOCABULARY).backend_for(spec), spec)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return all(matcher.accept_token(token_id) for token_id in token_ids)


def test_a_named_special_token_begins_what_its_text_begins() -> None:
    assert accepted(tag(["<mark>"]), [*b"So: ", MARK, *b"yes!", *b" and so on"])
    assert not accepted(tag(["<mark>"]), [MARK, *b"no"])


@pytest.mark.parametrize("named", [[], ["<other>"], ["<unknown>"], None, "<mark>", [["<mark>"], 5]])
def test_any_other_special_token_is_never_written(named: object) -> None:
    assert not accepted(tag(named), [MARK])
    assert accepted(tag(named), [*b"<mark>yes!"])


@pytest.mark.parametrize("text", ["5", "{", "[" * 20_000, '{"special_tokens": 5}'])
def test_a_broken_tag_is_left_to_the_compile(text: str) -> None:
    backends = Backends(VOCABULARY)
    plain = backends.backend_for(GrammarSpec("regex", "a"))
    assert backends.backend_for(GrammarSpec("structural_tag", text)) is plain


def test_equal_names_share_a_backend_and_the_oldest_are_let_go() -> None:
    names = [f"<{index}>" for index in range(MAX_SPELLING + 1)]
    tokens = (b"a", *(b"" for _ in names))
    backends = Backends(Vocabulary(tokens, {name: index for index, name in enumerate(names, start=1)}))
    first = backends.backend_for(tag(names[:1]))
    assert backends.backend_for(tag([names[0], names[0], "<unknown>"])) is first
    for name in names[1:]:
        backends.backend_for(tag([name]))
    assert backends.backend_for(tag(names[:1])) is not first


def test_special_tokens_are_known_by_their_text(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["[TOOL_CALLS]"])
    write_model_dir(tmp_path, backend)
    token_id = backend.token_to_id("[TOOL_CALLS]")
    vocabulary = read_vocabulary(tmp_path, 400)
    assert vocabulary.special_token_ids["[TOOL_CALLS]"] == token_id
    assert (vocabulary.tokens[token_id], vocabulary.spelling(["[TOOL_CALLS]"]).tokens[token_id]) == (
        b"",
        b"[TOOL_CALLS]",
    )
    assert "[TOOL_CALLS]" not in read_vocabulary(tmp_path, token_id).special_token_ids
