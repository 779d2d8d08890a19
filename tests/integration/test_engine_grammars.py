"""Structured output in a real engine process: broken grammars of every kind beside good ones, slow ones, idle waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core.scheduler.grammar import GRAMMAR_KINDS, GrammarSpec
from fakes.fake_executor import FAKE_VOCABULARY
from fakes.grammars import BROKEN, EOS, GOOD, spell
from running_engine import RunningEngine, engine_request, running_engine
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.v1 import common_pb2

# Takes a while to compile: so many optional properties.
SLOW_SCHEMA = json.dumps(
    {"type": "object", "properties": {f"property_{number}": {"type": "string"} for number in range(900)}}
)
# Takes a minute or longer: the square of that.
ENDLESS_SCHEMA = json.dumps(
    {"type": "object", "properties": {f"property_{number}": {"type": "string"} for number in range(16_000)}}
)


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running_engine("--num-blocks", "400", "--max-model-len", "-1", "--fake-grammars") as engine:
        yield engine


def constraint(spec: GrammarSpec) -> common_pb2.StructuredOutput:
    match spec.kind:
        case "json_object":
            return common_pb2.StructuredOutput(json_object=common_pb2.StructuredOutput.JsonObject())
        case "choice":
            choices = common_pb2.StructuredOutput.Choice(choices=json.loads(spec.text))
            return common_pb2.StructuredOutput(choice=choices)
        case _:
            return common_pb2.StructuredOutput(**{spec.kind: spec.text})  # type: ignore[arg-type]


def constrained(
    handle: int, spec: GrammarSpec, prompt: int = 10, max_tokens: int = 64, **fields: object
) -> pb.EngineCoreRequest:
    return engine_request(handle, [prompt] * 5, max_tokens, structured_output=constraint(spec), **fields)


def text_of(token_ids: list[int]) -> str:
    return b"".join(FAKE_VOCABULARY.tokens[token_id] for token_id in token_ids).decode()


def assert_idle(engine: RunningEngine) -> None:
    state = engine.connect("observer").dump_state().dump_state
    assert (list(state.requests), state.kv_blocks_used, list(state.invariant_violations)) == ([], 0, [])


def test_ready_names_the_kinds(engine: RunningEngine) -> None:
    assert tuple(engine.connect().next().ready.structured_output_kinds) == GRAMMAR_KINDS


def test_outputs_match_their_grammars(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(*(constrained(handle, GOOD[kind], handle) for handle, kind in enumerate(GRAMMAR_KINDS, start=10)))
    handles = dict(zip(GRAMMAR_KINDS, range(10, 16), strict=True))
    stream.until_finished(*handles.values())
    texts = {kind: text_of(stream.tokens[handle]) for kind, handle in handles.items()}
    reasons = {kind: stream.finishes[handle].reason for kind, handle in handles.items()}
    assert 10 <= int(texts["json_schema"]) <= 99
    assert texts["choice"] in json.loads(GOOD["choice"].text)
    assert len(texts["regex"]) == 3
    assert set(texts["regex"]) <= {"a", "b"}
    for kind in ("json_schema", "choice", "regex"):
        assert reasons[kind] == pb.ENGINE_FINISH_REASON_STOP
        assert stream.tokens[handles[kind]][-1] == EOS
    if reasons["json_object"] == pb.ENGINE_FINISH_REASON_STOP:
        assert isinstance(json.loads(texts["json_object"]), dict)


@pytest.mark.regression(10)
def test_broken_grammars_of_every_kind_harm_nobody(engine: RunningEngine) -> None:
    """§14 row 10: mixed with good ones and with requests without any."""
    stream = engine.connect()
    requests, broken, good, plain = [], [], [], []
    for number, spec in enumerate(BROKEN):
        handle = 10 * number + 1
        requests += [constrained(handle, spec), constrained(handle + 1, GOOD["regex"], number + 10)]
        requests.append(engine_request(handle + 2, [number + 10] * 3, max_tokens=4))
        broken.append(handle)
        good.append(handle + 1)
        plain.append(handle + 2)
    stream.add(*requests)
    stream.until_finished(*broken, *good, *plain)
    for handle, spec in zip(broken, BROKEN, strict=True):
        finish = stream.finishes[handle]
        assert finish.reason == pb.ENGINE_FINISH_REASON_ERROR, spec
        assert (finish.error.reason, finish.error.grpc_code) == ("GRAMMAR_INVALID", 3), spec
        assert not finish.error.retryable
        assert not stream.tokens.get(handle)
    for handle in good:
        assert stream.finishes[handle].reason == pb.ENGINE_FINISH_REASON_STOP
        assert len(text_of(stream.tokens[handle])) == 3
    assert {stream.finishes[handle].reason for handle in plain} == {pb.ENGINE_FINISH_REASON_LENGTH}
    assert_idle(engine)


def test_a_slow_grammar_holds_up_nobody_and_the_idle_loop_does_not_turn(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(constrained(1, GrammarSpec("json_schema", SLOW_SCHEMA), max_tokens=3), engine_request(2, [9], 3))
    stream.until_finished(2)
    assert 1 not in stream.finishes
    assert engine.metric(r"grammars_pending\{.*\}") == 1
    num_steps = engine.metric(r"steps_total\{.*\}")
    stream.until_finished(1)
    # A few for waking up, and one for each token; a loop that polls takes thousands.
    assert engine.metric(r"steps_total\{.*\}") - num_steps < 12
    assert engine.metric(r"grammars_pending\{.*\}") == 0
    assert len(stream.tokens[1]) == 3
    assert_idle(engine)


def test_a_resumed_request_goes_on_within_its_grammar(engine: RunningEngine) -> None:
    stream = engine.connect()
    spec = GrammarSpec("regex", "[ab]{8}")
    stream.add(constrained(1, spec))
    stream.until_finished(1)
    whole = stream.tokens[1]
    stream.add(
        constrained(2, spec, resume_output_token_ids=token_array.pack(whole[:4])),
        constrained(3, spec, resume_output_token_ids=token_array.pack(spell("ac"))),
    )
    stream.until_finished(2, 3)
    assert whole[:4] + stream.tokens[2] == whole
    assert stream.finishes[3].error.reason == "GRAMMAR_INVALID"


def test_time_limit_abort_deadline_and_drain_while_a_grammar_is_compiled() -> None:
    flags = ["--grammar-compile-timeout-s", "4", "--drain-timeout-s", "0", "--max-model-len", "-1"]
    with running_engine(*flags, "--fake-grammars") as engine:
        stream = engine.connect()
        endless = GrammarSpec("json_schema", ENDLESS_SCHEMA)
        stream.add(
            constrained(1, endless),
            constrained(2, endless),
            constrained(3, endless, queue_deadline_in_us=300_000),
            constrained(4, endless, deadline_in_us=400_000),
        )
        stream.abort(2)
        stream.until_finished(1, 2, 3, 4)
        # Nobody has waited for the compile, nor for one who has more time.
        assert [handle for handle in stream.finishes if handle != 2] == [3, 4, 1]
        assert stream.finishes[2].reason == pb.ENGINE_FINISH_REASON_ABORTED
        assert stream.finishes[3].error.reason == "QUEUE_TIMEOUT"
        assert stream.finishes[4].error.reason == "DEADLINE"
        assert stream.finishes[1].error.reason == "GRAMMAR_INVALID"
        assert "within 4 s" in stream.finishes[1].error.message
        # Its thread is lost, and others compile all the same.
        stream.add(constrained(5, GOOD["regex"]))
        stream.until_finished(5)
        assert stream.finishes[5].reason == pb.ENGINE_FINISH_REASON_STOP
        stream.add(constrained(6, GrammarSpec("json_schema", ENDLESS_SCHEMA + " ")))
        stream.until(lambda frame: any(output.events for output in frame.outputs.outputs))
        engine.terminate()
        stream.rest()
        assert stream.finishes[6].reason == pb.ENGINE_FINISH_REASON_ABORTED
        # Compiles that do not end do not keep the process.
        assert engine.wait() == 0


def test_without_a_vocabulary_nothing_is_offered_and_requests_are_refused() -> None:
    with running_engine("--max-model-len", "-1") as engine:
        stream = engine.connect()
        assert not stream.next().ready.structured_output_kinds
        stream.add(constrained(1, GOOD["regex"]), engine_request(2, [9], 3))
        stream.until_finished(1, 2)
        assert stream.finishes[1].reason == pb.ENGINE_FINISH_REASON_REJECTED
        assert "regex is not supported" in stream.finishes[1].error.message
        assert stream.finishes[2].reason == pb.ENGINE_FINISH_REASON_LENGTH


def test_nothing_imports_xgrammar_before_it_is_needed() -> None:
    """Importing it takes seconds, and health must be up before that."""
    sources = Path(__file__).parent.parent.parent / "services" / "engine_core"
    importers = {
        path.name
        for path in sources.rglob("*.py")
        if any(line.startswith(("import xgrammar", "from xgrammar")) for line in path.read_text().splitlines())
    }
    assert importers == {
        "backends.py",
        "grammar_cache.py",
        "grammar_compiler.py",
        "grammar_mask.py",
        "grammar_state.py",
        "grammar_text.py",
    }
