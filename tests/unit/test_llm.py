"""LLM around the fake executor: batches in order, failures raised or returned, chat, Ctrl-C, the progress bar."""

from __future__ import annotations

import signal
import threading

import pytest

from fakes.fake_executor import POISON_TOKEN, next_token
from fakes.offline_engine import FakeLoader, assert_nothing_left, make_llm
from offline import LLM, SamplingParams, StructuredOutputsParams
from stepwire.errors import EngineDeadError, InvalidRequestError, OverloadedError

SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
BAD = SamplingParams(top_p=7.0)


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def llm(monkeypatch, loader):
    with make_llm(monkeypatch, loader) as llm:
        yield llm


def generate(llm: LLM, *args: object, **options: object):
    return llm.generate(*args, use_tqdm=False, **options)  # type: ignore[arg-type]


def first_ids(prompt: list[int], num: int) -> list[int]:
    known = list(prompt)
    for _ in range(num):
        known.append(next_token(known))
    return known[len(prompt) :]


def test_answers_come_in_the_order_of_the_prompts(llm, loader) -> None:
    lengths = [9, 1, 5, 2, 7] * 8
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [[10 + index, 20, 30] for index in range(len(lengths))]
    outputs = generate(llm, prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == [
        first_ids(prompt, n) for prompt, n in zip(prompts, lengths, strict=True)
    ]
    assert all(output.finished and output.error is None for output in outputs)
    assert_nothing_left(llm.llm_engine, loader)


def test_a_batch_may_be_larger_than_the_queue_of_a_service(monkeypatch) -> None:
    loader = FakeLoader()
    with make_llm(monkeypatch, loader, num_blocks=64) as llm:
        outputs = generate(llm, [[10, 11]] * 1100, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        assert len(outputs) == 1100
        assert_nothing_left(llm.llm_engine, loader)


def test_one_prompt_may_stand_alone(llm) -> None:
    assert [output.prompt for output in generate(llm, "hello", SHORT)] == ["hello"]
    assert [output.prompt_token_ids for output in generate(llm, [10, 11], SHORT)] == [[10, 11]]
    assert [output.prompt_token_ids for output in generate(llm, ["hello", (10, 11)], SHORT)][1] == [10, 11]
    assert generate(llm, [], SHORT) == []


def test_request_ids_are_never_used_twice(llm) -> None:
    ids = [output.request_id for _ in range(2) for output in generate(llm, ["a", "b"], SHORT)]
    assert len(set(ids)) == 4


def test_a_batch_waits_for_requests_that_were_added_by_hand(llm, loader) -> None:
    """It would read their outputs and drop them."""
    engine = llm.llm_engine
    engine.add_request("mine", "hello", SHORT)
    for call in (lambda: generate(llm, ["a"], SHORT), lambda: generate(llm, []), lambda: llm.chat([], use_tqdm=False)):
        with pytest.raises(InvalidRequestError, match="llm_engine still has 1 request"):
            call()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert (outputs[-1].request_id, outputs[-1].finished) == ("mine", True)
    engine.add_request("given up", "hello", SHORT)
    engine.abort(["given up"])
    assert [output.finished for output in generate(llm, ["a", "b"], SHORT)] == [True, True]
    assert_nothing_left(engine, loader)


def test_parameters_must_be_as_many_as_prompts(llm) -> None:
    with pytest.raises(InvalidRequestError, match="1 for 2 prompts"):
        generate(llm, ["a", "b"], [SHORT])


def test_a_refused_prompt_is_raised_before_anything_runs(llm, loader) -> None:
    with pytest.raises(InvalidRequestError, match=r"sampling\.top_p") as caught:
        generate(llm, ["a", "b", "c"], [SHORT, BAD, SHORT])
    assert caught.value.__notes__ == ["prompt 1 of the batch"]
    assert loader.executor.scheduler_outputs == []
    assert generate(llm, "hello", SHORT)[0].finished
    assert_nothing_left(llm.llm_engine, loader)


def test_with_return_errors_only_the_bad_ones_fail(llm, loader) -> None:
    outputs = generate(llm, ["a", "b", "", "c"], [SHORT, BAD, SHORT, SHORT], return_errors=True)
    assert [type(output.error) for output in outputs] == [
        type(None),
        InvalidRequestError,
        InvalidRequestError,
        type(None),
    ]
    assert [len(output.outputs) for output in outputs] == [1, 0, 0, 1]
    assert all(output.finished for output in outputs)
    assert_nothing_left(llm.llm_engine, loader)


def test_a_failure_on_the_way_ends_the_batch_and_not_the_engine(monkeypatch) -> None:
    loader = FakeLoader(has_grammars=True)
    params = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputsParams(regex="(["))
    with make_llm(monkeypatch, loader) as llm:
        with pytest.raises(InvalidRequestError) as caught:
            generate(llm, [[10, 11], [12, 13]], [SamplingParams(max_tokens=200, ignore_eos=True), params])
        assert caught.value.reason == "GRAMMAR_INVALID"
        assert caught.value.__notes__ == ["prompt 1 of the batch"]
        outputs = generate(llm, [[10, 11], [12, 13]], [SHORT, params], return_errors=True)
        assert outputs[0].outputs[0].token_ids == first_ids([10, 11], 3)
        assert outputs[1].error is not None
        assert_nothing_left(llm.llm_engine, loader)


def test_overload_is_an_exception(monkeypatch, loader) -> None:
    with make_llm(monkeypatch, loader, max_queued_requests=1) as llm, pytest.raises(OverloadedError):
        generate(llm, ["a", "b"], SHORT)


def test_death_is_an_exception_of_this_and_every_later_batch(llm, loader) -> None:
    with pytest.raises(EngineDeadError, match="poisoned prompt"):
        generate(llm, [[10, 11], [POISON_TOKEN]], SHORT)
    assert loader.executor.is_shut_down
    with pytest.raises(EngineDeadError, match="poisoned prompt"):
        generate(llm, "a", SHORT)
    [output] = generate(llm, "a", SHORT, return_errors=True)
    assert isinstance(output.error, EngineDeadError)


def test_what_was_finished_before_a_death_is_kept(llm) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    executor_dies_at = 10
    executor = llm.llm_engine._client._core.executor
    real = executor.execute_model

    def execute(scheduler_output):
        if scheduler_output.step >= executor_dies_at:
            raise MemoryError("no memory left")
        real(scheduler_output)

    executor.execute_model = execute
    short, lost = generate(llm, [[10, 11], [12, 13]], [SHORT, long], return_errors=True)
    assert (short.error, len(short.outputs[0].token_ids)) == (None, 3)
    assert isinstance(lost.error, EngineDeadError)
    assert lost.error.cause == "OUT_OF_MEMORY"
    assert 0 < len(lost.outputs[0].token_ids) < 30


def test_chat_renders_the_models_template(llm) -> None:
    [output] = llm.chat([{"role": "user", "content": "hello"}], SHORT, use_tqdm=False)
    assert output.prompt == "<user>hello<a>"
    [output] = llm.chat([{"role": "user", "content": "hello"}], SHORT, use_tqdm=False, add_generation_prompt=False)
    assert output.prompt == "<user>hello"
    [output] = llm.chat([{"role": "u", "content": "x"}], SHORT, use_tqdm=False, chat_template="{{ messages[0].role }}")
    assert output.prompt == "u"


def test_several_conversations_of_which_one_is_none(llm, loader) -> None:
    good = [{"role": "user", "content": "hello"}]
    outputs = llm.chat([good, [{"content": "no role"}], good], SHORT, use_tqdm=False, return_errors=True)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[0].outputs == outputs[2].outputs
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat([good, [{"content": "no role"}]], SHORT, use_tqdm=False)
    # The workers hear of what was given up with the next step.
    llm.llm_engine.step()
    assert_nothing_left(llm.llm_engine, loader)


def interrupt_steps(executor, *steps: int) -> None:
    """Ctrl-C in the middle of these steps, as often as they are named."""
    real = executor.execute_model

    def execute(scheduler_output):
        for step in steps:
            if scheduler_output.step == step:
                signal.raise_signal(signal.SIGINT)
        real(scheduler_output)

    executor.execute_model = execute


def test_ctrl_c_gives_up_the_batch_and_leaves_the_engine_whole(llm, loader) -> None:
    interrupt_steps(loader.executor, 4)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [[10, 11], [12, 13]], SamplingParams(max_tokens=200, ignore_eos=True))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert generate(llm, [10, 11], SHORT)[0].outputs[0].token_ids == first_ids([10, 11], 3)
    assert_nothing_left(llm.llm_engine, loader)


def test_ctrl_c_is_not_lost_behind_another_error(llm, monkeypatch) -> None:
    def add(*args, **options):
        signal.raise_signal(signal.SIGINT)
        raise InvalidRequestError("refused")

    monkeypatch.setattr(llm.llm_engine, "add_request", add)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b"], SHORT, return_errors=True)


def test_a_second_ctrl_c_does_not_wait_and_costs_the_engine(llm, loader) -> None:
    interrupt_steps(loader.executor, 4, 4)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [10, 11], SamplingParams(max_tokens=200, ignore_eos=True))
    assert loader.executor.is_shut_down
    with pytest.raises(EngineDeadError) as caught:
        generate(llm, [10, 11], SHORT)
    assert caught.value.cause_type == "KeyboardInterrupt"


def test_a_program_keeps_its_own_signal_handler(llm, loader) -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        interrupt_steps(loader.executor, 2)
        assert generate(llm, [10, 11], SHORT)[0].finished
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [signal.SIGINT]


def test_it_works_in_any_thread(llm) -> None:
    outputs: list[object] = []
    thread = threading.Thread(target=lambda: outputs.extend(generate(llm, "hello", SHORT)))
    thread.start()
    thread.join()
    assert len(outputs) == 1


def test_the_bar_goes_to_standard_error_and_can_be_switched_off(llm, capsys) -> None:
    llm.generate(["a", "b"], SHORT)
    shown = capsys.readouterr()
    assert (shown.out, "2/2" in shown.err) == ("", True)
    generate(llm, ["a", "b"], SHORT)
    assert capsys.readouterr() == ("", "")


def test_the_model_is_stepped_in_the_callers_thread_by_default(llm) -> None:
    before = set(threading.enumerate())
    generate(llm, ["a", "b"], SHORT)
    assert set(threading.enumerate()) <= before


def test_leaving_the_with_closes(monkeypatch, loader) -> None:
    with make_llm(monkeypatch, loader):
        assert not loader.executor.is_shut_down
    assert loader.executor.is_shut_down
