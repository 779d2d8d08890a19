"""LLMEngine around the fake executor: what comes out of which step, ends of every kind, and nothing left behind."""

from __future__ import annotations

import itertools
import threading

import pytest

from fakes.fake_executor import CALLBACK_TOKEN, POISON_TOKEN, next_token
from fakes.offline_engine import FakeLoader, assert_nothing_left, core_of, make_engine
from offline import RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from offline.llm_engine import LLMEngine
from stepwire.errors import EngineDeadError, InvalidRequestError, OverloadedError, RequestFailedError

PROMPT = [10, 11, 12, 13, 14]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def engine(loader):
    engine = make_engine(loader)
    yield engine
    engine.close()


def params(max_tokens: int = 5, **fields: object) -> SamplingParams:
    return SamplingParams(**{**GREEDY, "max_tokens": max_tokens, **fields})  # type: ignore[arg-type]


def expected_ids(prompt: list[int], num: int) -> list[int]:
    known = list(prompt)
    for _ in range(num):
        known.append(next_token(known))
    return known[len(prompt) :]


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_cumulative_outputs_grow_with_every_step(engine, loader) -> None:
    engine.add_request("a", PROMPT, params(4))
    outputs = run(engine)
    # The third token is a part of a character, and waits for the rest.
    ids = expected_ids(PROMPT, 4)
    assert [output.outputs[0].token_ids for output in outputs] == [ids[:1], ids[:2], ids]
    assert [output.finished for output in outputs] == [False, False, True]
    assert [output.outputs[0].finish_reason for output in outputs] == [None, None, "length"]
    assert all(b.outputs[0].text.startswith(a.outputs[0].text) for a, b in itertools.pairwise(outputs))
    assert outputs[-1].usage.completion_tokens == 4
    assert_nothing_left(engine, loader)


def test_deltas_add_up_and_final_only_comes_once(engine, loader) -> None:
    engine.add_request("whole", PROMPT, params(output_kind=RequestOutputKind.FINAL_ONLY))
    engine.add_request("delta", PROMPT, params(output_kind=RequestOutputKind.DELTA, logprobs=0))
    outputs = run(engine)
    [whole] = [output for output in outputs if output.request_id == "whole"]
    deltas = [output.outputs[0] for output in outputs if output.request_id == "delta"]
    assert len(deltas) > 2
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.outputs[0].token_ids
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [len(delta.logprobs) for delta in deltas] == [len(delta.token_ids) for delta in deltas]
    assert_nothing_left(engine, loader)


def test_a_text_is_encoded_and_given_back(engine) -> None:
    engine.add_request("a", "hello world", params(1))
    [output] = run(engine)
    assert output.prompt == "hello world"
    assert output.usage.prompt_tokens == len(output.prompt_token_ids) == 2


def test_all_choices_are_one_request(engine, loader) -> None:
    engine.add_request("a", PROMPT, params(3, n=3, temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY))
    [output] = run(engine)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in output.outputs] == [expected_ids(PROMPT, 3)] * 3
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (5, 9)
    assert_nothing_left(engine, loader)


def test_logprobs_are_given_for_output_and_prompt(engine) -> None:
    engine.add_request("a", PROMPT, params(2, logprobs=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY))
    [output] = run(engine)
    choice = output.outputs[0]
    assert [next(iter(position)) for position in choice.logprobs] == choice.token_ids
    assert choice.cumulative_logprob == pytest.approx(
        sum(next(iter(position.values())).logprob for position in choice.logprobs)
    )
    assert output.prompt_logprobs[0] is None
    assert [next(iter(position)) for position in output.prompt_logprobs[1:]] == PROMPT[1:]


def test_a_stop_string_ends_the_request_in_the_engine_too(engine, loader) -> None:
    engine.add_request("probe", PROMPT, params(20, output_kind=RequestOutputKind.FINAL_ONLY))
    [probe] = run(engine)
    text = probe.outputs[0].text
    stop = text[3:5]
    engine.add_request("a", PROMPT, params(200, stop=stop, output_kind=RequestOutputKind.FINAL_ONLY))
    [output] = run(engine)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert_nothing_left(engine, loader)


def test_a_stop_token_is_named(engine) -> None:
    third = expected_ids(PROMPT, 3)[2]
    engine.add_request("a", PROMPT, params(50, stop_token_ids=[third], output_kind=RequestOutputKind.FINAL_ONLY))
    [output] = run(engine)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", third)


def test_an_aborted_request_has_no_more_outputs_and_its_id_is_free_again(engine, loader) -> None:
    engine.add_request("a", PROMPT, params(50))
    engine.add_request("b", PROMPT, params(3))
    engine.step()
    engine.abort(["a", "nobody"])
    engine.add_request("a", PROMPT, params(1))
    outputs = run(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs if output.request_id == "a"] == [1]
    assert [output.finished for output in outputs if output.request_id == "b"] == [False, True]
    assert_nothing_left(engine, loader)


def test_an_id_in_flight_is_refused(engine) -> None:
    engine.add_request("a", PROMPT, params())
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("a", PROMPT, params())
    assert caught.value.reason == "DUPLICATE_REQUEST"
    assert run(engine)[-1].finished


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        (PROMPT, {"top_p": 7.0}, "sampling.top_p"),
        (PROMPT, {"min_tokens": 9}, "stop.min_tokens"),
        ([], {}, "token_ids.ids"),
        ([5000], {}, "token_ids.ids[0]"),
        ("", {}, "text"),
        (PROMPT, {"structured_outputs": StructuredOutputsParams(regex="a")}, "structured_output.regex"),
    ],
)
def test_the_frontend_checks_every_request(engine, loader, prompt, fields, field) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("a", prompt, params(**fields))
    assert field in [violation.field for violation in caught.value.violations]
    assert_nothing_left(engine, loader)


def test_one_that_can_not_be_detokenized_fails_alone(engine, loader, monkeypatch) -> None:
    tokenizer = engine._model.tokenizer
    prompt = [30, 31, 32]
    real, poison = tokenizer.decode, expected_ids(prompt, 2)[1]

    def decode(token_ids, **options):
        if poison in token_ids:
            raise RuntimeError("no text for this")
        return real(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", decode)
    engine.add_request("bad", prompt, params(40))
    engine.add_request("good", [20, 21], params(3, output_kind=RequestOutputKind.FINAL_ONLY))
    outputs = run(engine)
    [bad] = [output for output in outputs if output.request_id == "bad" and output.finished]
    [good] = [output for output in outputs if output.request_id == "good"]
    assert isinstance(bad.error, RequestFailedError)
    assert bad.error.reason == "OUTPUT_PROCESSING"
    assert poison not in bad.outputs[0].token_ids
    assert (good.error, good.outputs[0].token_ids) == (None, expected_ids([20, 21], 3))
    assert_nothing_left(engine, loader)


def test_a_full_queue_is_an_error_of_the_request(loader) -> None:
    engine = make_engine(loader, max_queued_requests=1)
    engine.add_request("first", PROMPT, params(2))
    engine.add_request("second", PROMPT, params(2, n=2, temperature=1.0))
    outputs = run(engine)
    [refused] = [output for output in outputs if output.request_id == "second"]
    assert isinstance(refused.error, OverloadedError)
    assert refused.error.reason == "QUEUE_FULL"
    assert [output.request_id for output in outputs if output.finished and output.error is None] == ["first"]
    assert_nothing_left(engine, loader)
    engine.close()


def test_a_failing_step_is_the_end_of_all_and_of_the_engine(engine, loader) -> None:
    engine.add_request("bystander", PROMPT, params(50))
    engine.step()
    engine.add_request("poison", [POISON_TOKEN], params())
    outputs = run(engine)
    assert {output.request_id for output in outputs if output.error is not None} == {"bystander", "poison"}
    for output in outputs[-2:]:
        assert isinstance(output.error, EngineDeadError)
        assert (output.error.cause, output.error.cause_type) == ("STEP_FAILED", "RuntimeError")
        assert output.error.report_id
    assert loader.executor.is_shut_down
    with pytest.raises(EngineDeadError, match="poisoned prompt"):
        engine.add_request("late", PROMPT, params())
    assert not engine.has_unfinished_requests()
    assert engine._answers == engine._by_handle == {}


def test_a_dead_worker_is_noticed_before_the_next_step(engine, loader) -> None:
    before = set(threading.enumerate())
    engine.add_request("a", [CALLBACK_TOKEN], params(1000))
    engine.step()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    [last] = [output for output in run(engine) if output.finished]
    assert isinstance(last.error, EngineDeadError)
    assert (last.error.cause, last.error.cause_type) == ("EXECUTOR_FAILED", "RuntimeError")


def test_a_grammar_holds_and_a_broken_one_fails_alone() -> None:
    loader = FakeLoader(has_grammars=True)
    engine = make_engine(loader)
    final = {"output_kind": RequestOutputKind.FINAL_ONLY, "ignore_eos": False}
    engine.add_request("good", PROMPT, params(9, structured_outputs=StructuredOutputsParams(regex="[ab]{3}"), **final))
    engine.add_request("bad", PROMPT, params(9, structured_outputs=StructuredOutputsParams(regex="(["), **final))
    outputs = {output.request_id: output for output in run(engine)}
    assert outputs["good"].error is None
    assert outputs["good"].outputs[0].finish_reason == "stop"
    assert isinstance(outputs["bad"].error, InvalidRequestError)
    assert outputs["bad"].error.reason == "GRAMMAR_INVALID"
    assert_nothing_left(engine, loader)
    engine.close()


def test_a_grammar_that_takes_too_long_is_refused_by_the_loop_itself() -> None:
    loader = FakeLoader(has_grammars=True)
    engine = make_engine(loader, grammar_compile_timeout_s=0.001)
    is_over, manager = threading.Event(), core_of(engine).structured_output
    manager._compiler._compile_one = lambda *_: is_over.wait() and 1 / 0
    engine.add_request("slow", PROMPT, params(9, structured_outputs=StructuredOutputsParams(regex="a")))
    [output] = run(engine)
    is_over.set()
    assert output.error is not None
    assert output.error.reason == "GRAMMAR_INVALID"
    assert_nothing_left(engine, loader)
    engine.close()


def test_asynchronous_scheduling_changes_no_answer(engine) -> None:
    loader = FakeLoader()
    overlapping = make_engine(loader, async_scheduling=True)
    answers = []
    for one in (engine, overlapping):
        for index in range(12):
            fields = {"stop_token_ids": [23], "output_kind": RequestOutputKind.FINAL_ONLY}
            one.add_request(str(index), [10 + index, 11, 12], params(3 + index, **fields))
        answers.append({output.request_id: output.outputs for output in run(one)})
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12
    assert_nothing_left(overlapping, loader)
    overlapping.close()


def test_no_thread_is_started(engine) -> None:
    before = set(threading.enumerate())
    engine.add_request("a", "hello world", params(3, bad_words=["the"]))
    while engine.has_unfinished_requests():
        engine.step()
        assert set(threading.enumerate()) <= before


def test_a_closed_engine_says_so(engine, loader) -> None:
    engine.add_request("a", PROMPT, params())
    engine.step()
    engine.close()
    engine.close()
    assert loader.executor.is_shut_down
    assert not engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request("b", PROMPT, params())
    assert engine._answers == engine._by_handle == {}


def test_dropping_the_engine_closes_it(loader) -> None:
    engine = make_engine(loader)
    engine.add_request("a", PROMPT, params())
    engine.step()
    del engine
    assert loader.executor.is_shut_down


def test_a_failed_start_closes_what_was_started(loader, monkeypatch) -> None:
    monkeypatch.setattr("offline.llm_engine.tokenizer_archive.unpack", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_engine(loader)
    assert loader.executor.is_shut_down
