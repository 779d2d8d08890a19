"""Compiling beside the loop: every kind, shared work, the cache, the time limit, and broken grammars."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import xgrammar

from engine_core.scheduler.grammar import GRAMMAR_KINDS, GrammarSpec
from engine_core.structured_output import compile_threads
from engine_core.structured_output.backends import Backends
from engine_core.structured_output.grammar_compiler import GrammarCompiler
from engine_core.structured_output.grammar_state import GrammarState
from engine_core.structured_output.grammar_text import GrammarError, compile_spec
from fakes.fake_executor import FAKE_VOCABULARY
from fakes.grammars import BROKEN, EOS, GOOD, OUTPUTS, allowed_next, make_compiler, spell

TIMEOUT_S = 60
YES = GOOD["choice"]


class Harness:
    """A compiler whose compiles stop at a gate, and states that report here."""

    def __init__(self, **arguments: object) -> None:
        self.now = 0.0
        self.started: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.gates: dict[str, threading.Event] = {}
        self.compiler = make_compiler(clock=lambda: self.now, compile_one=self._compile, **arguments)
        self._num_states = 0

    def hold(self, spec: GrammarSpec) -> None:
        self.gates[spec.text] = threading.Event()

    def _compile(self, backend: xgrammar.GrammarCompiler, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        self.started.put(spec.text)
        if spec.text in self.gates:
            assert self.gates[spec.text].wait(TIMEOUT_S)
        return compile_spec(backend, spec)

    def start(self, spec: GrammarSpec, resumed: list[int] | None = None, eos: tuple[int, ...] = (EOS,)) -> GrammarState:
        self._num_states += 1
        state = GrammarState(("s", self._num_states), eos, resumed or [], lambda key: self.done.put(key[1]))
        self.compiler.start(spec, state)
        return state

    def wait(self, number: int = 1) -> list[int]:
        return [self.done.get(timeout=TIMEOUT_S) for _ in range(number)]

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self.compiler.shutdown()


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.close()


def test_there_is_an_example_of_every_kind() -> None:
    assert set(GOOD) == set(OUTPUTS) == set(GRAMMAR_KINDS)
    assert {spec.kind for spec in BROKEN} == set(GRAMMAR_KINDS) - {"json_object"}


@pytest.mark.parametrize("kind", GRAMMAR_KINDS)
def test_every_kind_allows_its_output_then_only_the_end(harness: Harness, kind: str) -> None:
    state = harness.start(GOOD[kind])
    harness.wait()
    assert state.error is None
    for token_id in spell(OUTPUTS[kind]):
        assert token_id in allowed_next(state)
        assert state.accept(token_id)
    assert EOS in allowed_next(state)
    assert state.accept(EOS)
    assert state.is_terminated


@pytest.mark.parametrize("spec", BROKEN, ids=lambda spec: f"{spec.kind}:{spec.text[:30]}")
def test_a_broken_grammar_fails_in_words_and_the_next_one_compiles(harness: Harness, spec: GrammarSpec) -> None:
    broken, good = harness.start(spec), harness.start(YES)
    harness.wait(2)
    assert broken.error is not None
    assert not broken.is_ready
    assert not broken.accept(spell("a")[0])
    assert "\n" not in message_of(broken)
    assert ".cc:" not in message_of(broken)
    assert (good.error, good.is_ready) == (None, True)


def test_an_unknown_kind_is_an_error_of_its_request(harness: Harness) -> None:
    state = harness.start(GrammarSpec("poem", "a"))
    harness.wait()
    assert message_of(state) == "poem is no kind of constraint that this engine knows"


def test_equal_grammars_are_compiled_once_also_at_the_same_time(harness: Harness) -> None:
    harness.hold(YES)
    states = [harness.start(YES) for _ in range(5)]
    assert harness.compiler.num_pending == 1
    harness.gates[YES.text].set()
    harness.wait(5)
    states.append(harness.start(YES))
    assert states[-1].is_ready, "a cached grammar is ready at once"
    assert harness.started.qsize() == 1
    # Compiled once, but each at its own place.
    states[0].accept(spell("n")[0])
    assert allowed_next(states[0]) == {spell("o")[0]}
    assert spell("y")[0] in allowed_next(states[1])


def test_the_cache_is_bounded_by_bytes_and_drops_what_was_not_used() -> None:
    a, b, c = (GrammarSpec("regex", f"[a-z]{{5}}{letter}") for letter in "abc")
    probe = Harness()
    probe.start(a)
    probe.wait()
    size = probe.compiler._cache.num_bytes
    probe.close()
    harness = Harness(cache_bytes=int(2.5 * size))
    for spec in (a, b, a, c, a, b):
        harness.start(spec)
        harness.wait()
    assert [harness.started.get() for _ in range(harness.started.qsize())] == [a.text, b.text, c.text, b.text]
    harness.close()


def test_a_grammar_larger_than_the_cache_is_used_and_not_kept() -> None:
    harness = Harness(cache_bytes=1)
    for _ in range(2):
        state = harness.start(YES)
        harness.wait()
        assert state.is_ready
    assert harness.started.qsize() == 2
    harness.close()


def message_of(state: GrammarState) -> str:
    assert state.error is not None
    return state.error.message


def test_overrunning_fails_its_requests_and_others_go_on(harness: Harness) -> None:
    slow = GrammarSpec("regex", "slow")
    harness.hold(slow)
    first = harness.start(slow)
    assert harness.started.get(timeout=TIMEOUT_S) == "slow"
    behind = harness.start(YES)
    harness.now = 30.0
    harness.compiler.expire()
    assert first.error is None, "its time is not over"
    harness.now = 30.1
    harness.compiler.expire()
    assert message_of(first) == "regex does not compile within 30 s"
    # The only thread is lost; another one takes its place.
    assert sorted(harness.wait(2)) == [1, 2]
    assert behind.is_ready
    late = harness.start(slow)
    assert late.error == first.error, "known to overrun: it is not tried again while it lasts"
    harness.wait()
    harness.gates["slow"].set()
    assert harness.started.get(timeout=TIMEOUT_S) == YES.text
    again = GrammarSpec("regex", "again")
    state = harness.start(again)
    harness.wait()
    assert state.is_ready
    assert first.error is not None
    assert not first.is_ready


def test_waiting_behind_another_grammar_does_not_count_as_overrunning(harness: Harness) -> None:
    slow = GrammarSpec("regex", "slow")
    harness.hold(slow)
    harness.start(slow)
    harness.started.get(timeout=TIMEOUT_S)
    behind = harness.start(YES)
    harness.now = 29.0
    harness.compiler.expire()
    harness.gates["slow"].set()
    harness.wait(2)
    harness.now = 31.0
    harness.compiler.expire()
    assert behind.is_ready


def test_lost_threads_are_replaced_up_to_a_limit(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "MAX_WRITTEN_OFF", 1)
    first, second = GrammarSpec("regex", "one"), GrammarSpec("regex", "two")
    for spec in (first, second):
        harness.hold(spec)
        state = harness.start(spec)
        assert harness.started.get(timeout=TIMEOUT_S) == spec.text
        harness.now += 31
        harness.compiler.expire()
        assert state.error is not None
        harness.wait()
    behind = harness.start(YES)
    assert harness.started.empty()
    # Whichever comes back, what waits goes on.
    harness.gates["two"].set()
    assert harness.wait() == [3]
    assert behind.is_ready
    harness.gates["one"].set()


def test_when_no_thread_comes_back_whoever_waits_is_told_so(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "MAX_WRITTEN_OFF", 0)
    slow = GrammarSpec("regex", "slow")
    harness.hold(slow)
    harness.start(slow)
    harness.started.get(timeout=TIMEOUT_S)
    harness.now = 20.0
    behind = harness.start(YES)
    harness.now = 31.0
    harness.compiler.expire()
    assert behind.error is None, "it has not waited for long"
    harness.now = 51.0
    harness.compiler.expire()
    assert behind.error is not None
    assert (behind.error.reason, behind.error.retryable) == ("QUEUE_FULL", True)
    assert sorted(harness.wait(2)) == [1, 2]
    # The thread comes back: what was dropped is not compiled, and what comes then is.
    harness.gates["slow"].set()
    again = harness.start(YES)
    assert harness.wait() == [3]
    assert again.is_ready
    assert harness.started.get(timeout=TIMEOUT_S) == YES.text
    assert harness.started.empty()
    assert harness.compiler.num_pending == 0


def test_an_unforeseen_failure_is_the_requests_own() -> None:
    def explode(backend: xgrammar.GrammarCompiler, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        raise MemoryError(spec.text)

    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    compiler: GrammarCompiler = make_compiler(compile_one=explode)
    for number in (1, 2):
        state = GrammarState(("s", number), [EOS], [], lambda key: done.put(key[1]))
        compiler.start(YES, state)
        assert done.get(timeout=TIMEOUT_S) == number
        assert state.error is not None
        assert "MemoryError" in message_of(state)
    compiler.shutdown()


def test_refused_schemas_name_the_place() -> None:
    backend = Backends(FAKE_VOCABULARY).backend_for(GrammarSpec("json_object", ""))
    with pytest.raises(GrammarError, match=r"json_schema does not compile: #/items: not is not supported"):
        compile_spec(backend, GrammarSpec("json_schema", '{"type": "array", "items": {"not": {}}}'))


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("json_schema", '{"type": "canary"}', "Unsupported type ..."),
        ("json_schema", '{"$ref": "#/$defs/canary"}', "Cannot find field ... in ..."),
        ("json_schema", '"canary"', "Schema should be an object or bool"),
        ("grammar", "root ::= canary", "Rule ... is not defined"),
        ("grammar", "canary ::= a", 'The root rule with name "root" is not found'),
        ("regex", "(canary", "The parenthesis is not closed."),
        ("structural_tag", '{"format": {"type": "canary"}, "type": "structural_tag"}', "Format type"),
    ],
)
def test_errors_of_the_library_are_told_without_what_they_quote(kind: str, text: str, told: str) -> None:
    spec = GrammarSpec(kind, text)
    with pytest.raises(GrammarError) as caught:
        compile_spec(Backends(FAKE_VOCABULARY).backend_for(spec), spec)
    assert str(caught.value).endswith(told)
    assert "canary" not in str(caught.value)


# -- the state of one request ------------------------------------------------------------------------------------------


def test_resumed_output_is_gone_over_first(harness: Harness) -> None:
    state = harness.start(GOOD["regex"], resumed=spell("ab"))
    harness.wait()
    assert state.accept(spell("a")[0])
    assert allowed_next(state) == {EOS}


@pytest.mark.parametrize(
    ("resumed", "error"),
    [
        ("abx", "the resumed output leaves the grammar at token 2"),
        ("aba\x02", "there is nothing to generate: the grammar is at its end"),
    ],
)
def test_resumed_output_that_does_not_fit_is_an_error(harness: Harness, resumed: str, error: str) -> None:
    token_ids = [EOS if character == "\x02" else spell(character)[0] for character in resumed]
    state = harness.start(GOOD["regex"], resumed=token_ids)
    harness.wait()
    assert message_of(state) == error


def test_what_the_grammar_refuses_is_refused_and_changes_nothing(harness: Harness) -> None:
    state = harness.start(GOOD["regex"])
    harness.wait()
    for refused in (spell("c")[0], EOS, 3, 10**6):
        assert not state.accept(refused)
    assert spell("a")[0] in allowed_next(state)
    assert all(state.accept(token_id) for token_id in spell("aba"))


def test_tokens_of_several_bytes_and_of_half_a_character_count(harness: Harness) -> None:
    state = harness.start(GrammarSpec("regex", "é+(ab)?"))
    harness.wait()
    assert allowed_next(state) == {203, 204}
    assert state.accept(204)
    assert allowed_next(state) == {205}
    assert state.accept(205)
    assert {200, 203, EOS} <= allowed_next(state)


def test_without_an_end_of_sequence_id_the_grammars_first_end_is_the_end(harness: Harness) -> None:
    state = harness.start(GOOD["regex"], eos=())
    harness.wait()
    assert not state.is_terminated
    assert all(state.accept(token_id) for token_id in spell("aba"))
    assert state.is_terminated


def test_each_of_several_end_of_sequence_ids_ends(harness: Harness) -> None:
    for eos in (EOS, 7):
        state = harness.start(GOOD["regex"], resumed=spell("aba"), eos=(EOS, 7))
        harness.wait()
        assert allowed_next(state) == {EOS, 7}
        assert state.accept(eos)
        assert state.is_terminated


class FailingMatcher:
    """A matcher whose own checks fail, as the library's do: with RuntimeError."""

    def accept_token(self, token_id: int) -> bool:
        raise RuntimeError("check failed")

    def fill_next_token_bitmask(self, words: object, row: int) -> None:
        raise RuntimeError("check failed")


@pytest.mark.parametrize("fills_first", [False, True])
def test_a_failure_inside_the_matcher_refuses_the_token_of_that_request(harness: Harness, fills_first: bool) -> None:
    state = harness.start(GOOD["regex"])
    harness.wait()
    matcher = state._matcher
    state._matcher = FailingMatcher()  # type: ignore[assignment]
    if fills_first:
        assert len(allowed_next(state)) == 512, "the step goes on with any token"
        state._matcher = matcher
    assert not state.accept(spell("a")[0])
