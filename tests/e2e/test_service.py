"""Two real processes and the real model: answers, isolation, many streams at once, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from running_stack import SERVING, Frontend, Service, running_stack, wait_until_zero
from stepwire.v1 import common_pb2, generation_service_pb2, model_service_pb2, tokenization_service_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def stack(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Frontend]]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        engine = stack.engine()
        frontend = stack.frontend(engine)
        frontend.wait_for_health(SERVING)
        yield engine, frontend


def greedy(text: str, max_tokens: int, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        text=text,
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=common_pb2.OutputOptions(token_ids=True, timings=True),
        **fields,  # type: ignore[arg-type]
    )


def stream_of(frontend: Frontend, request: GenerateRequest) -> list[generation_service_pb2.GenerateStreamResponse]:
    return list(frontend.generation.GenerateStream(request, timeout=TIMEOUT_S))


def assert_nothing_left(engine: Service, *frontends: Frontend) -> None:
    """KV usage back to 0, no request anywhere, no entry in any id map."""
    for name in ("kv_cache_usage_ratio", "requests_running", "requests_waiting"):
        wait_until_zero(engine, f"stepwire_engine_core_{name}")
    for frontend in frontends:
        wait_until_zero(frontend, "stepwire_frontend_requests_in_flight")
        wait_until_zero(frontend, "stepwire_frontend_live_handles")


def test_a_stream_is_accepted_then_deltas_then_finished(stack: tuple[Service, Frontend]) -> None:
    _, frontend = stack
    messages = stream_of(frontend, greedy("The capital of France is", 8))
    assert [message.index for message in messages] == list(range(len(messages)))
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds[0] == "accepted"
    assert set(kinds[1:-1]) == {"delta"}
    assert kinds[-1] == "finished"
    assert "Paris" in "".join(message.delta.text for message in messages)
    finished = messages[-1].finished
    assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert finished.usage.completion_tokens == 8
    assert finished.timings.ttft_ns > 0
    assert finished.timings.prefill_ns > 0


def test_unary_and_stream_agree_and_sampling_repeats_by_seed(stack: tuple[Service, Frontend]) -> None:
    _, frontend = stack
    request = greedy("Once upon a time", 12)
    text = "".join(message.delta.text for message in stream_of(frontend, request))
    assert frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0].text == text
    request.sampling.temperature = 1.0
    request.sampling.seed = 42
    first, second = (frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0] for _ in range(2))
    assert first.token_ids == second.token_ids


def test_a_resumed_stream_goes_on_as_if_nothing_had_happened(stack: tuple[Service, Frontend]) -> None:
    _, frontend = stack
    request = greedy("My favourite colour is", 16)
    request.sampling.temperature = 0.8
    request.sampling.seed = 7
    whole = list(frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0].token_ids)
    request.resume_output_token_ids.ids.extend(whole[:6])
    rest = list(frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0].token_ids)
    assert whole[:6] + rest == whole


# What a request may ask for that looks back at the output, each with a cut in whose reach it matters.
RESUMED = {
    "penalties": {"sampling": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.5}},
    "bad words": {"sampling": {"bad_words": ["the", "little girl", "a small village"]}},
    # The end of sequence is the likeliest of all tokens, as soon as it may come.
    "min_tokens": {"sampling": {"logit_bias": {2: 100.0}}, "stop": {"min_tokens": 9}},
    "repetition": {
        "sampling": {"temperature": 0, "allowed_token_ids": [42, 43]},
        "stop": {"repetition_detection": {"max_pattern_tokens": 2, "min_pattern_tokens": 1, "min_repeats": 6}},
    },
    "regex": {"structured_output": {"regex": r"( [a-z]{2,7}){3},( [a-z]{2,7}){3}\."}},
    "schema": {
        "structured_output": {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 5}'},
    },
}
ENDING_BY_THEMSELVES = ("min_tokens", "regex", "schema")


@pytest.mark.parametrize("name", RESUMED)
def test_whatever_looks_back_at_the_output_sees_what_was_resumed(stack: tuple[Service, Frontend], name: str) -> None:
    _, frontend = stack
    request = greedy("Once upon a time there was", 16)
    request.sampling.temperature = 0.9
    request.sampling.seed = 3
    request.stop.ignore_eos = name not in ENDING_BY_THEMSELVES
    request.MergeFrom(GenerateRequest(**RESUMED[name]))
    whole = frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0]
    plain = greedy("Once upon a time there was", 16)
    plain.sampling.temperature, plain.sampling.seed = request.sampling.temperature, 3
    free = frontend.generation.Generate(plain, timeout=TIMEOUT_S).completions[0]
    assert (whole.text, whole.reason) != (free.text, free.reason), "it makes no difference to this answer"
    for cut in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        request.resume_output_token_ids.ids[:] = whole.token_ids[:cut]
        rest = frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0]
        assert [*whole.token_ids[:cut], *rest.token_ids] == list(whole.token_ids)
        assert (rest.reason, rest.stop_match) == (whole.reason, whole.stop_match)


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_stop_string_may_lie_across_the_cut(stack: tuple[Service, Frontend], is_shown: bool) -> None:
    _, frontend = stack
    request = greedy("Once upon a time", 16)
    # Three tokens in the middle, and half a word more.
    ids = frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0].token_ids
    pieces = tokenization_service_pb2.DetokenizeRequest(sequences=[{"ids": [token_id]} for token_id in ids[6:10]])
    *inside, behind = frontend.tokenization.Detokenize(pieces, timeout=TIMEOUT_S).texts
    request.stop.stop.append("".join(inside) + behind[:2])
    request.stop.include_stop_in_output = is_shown
    whole = [message for message in stream_of(frontend, request) if not message.HasField("accepted")]
    assert whole[-1].finished.stop_match.stop_string == request.stop.stop[0]
    # Not behind the last delta: who resumes there asks for more than the answer.
    for cut in range(1, len(whole) - 1):
        ids = [token_id for message in whole[:cut] for token_id in message.delta.token_ids]
        request.resume_output_token_ids.ids[:] = ids
        rest = stream_of(frontend, request)[1:]
        joined, expected = ("".join(one.delta.text for one in part) for part in ([*whole[:cut], *rest], whole))
        assert joined == expected
        assert rest[-1].finished.stop_match == whole[-1].finished.stop_match


def test_four_choices_differ_and_are_counted_once(stack: tuple[Service, Frontend]) -> None:
    engine, frontend = stack
    request = greedy("Once upon a time", 10)
    request.sampling.temperature = 1.0
    request.sampling.seed = 5
    request.sampling.n = 4
    answer = frontend.generation.Generate(request, timeout=TIMEOUT_S)
    assert [completion.choice for completion in answer.completions] == [0, 1, 2, 3]
    assert len({completion.text for completion in answer.completions}) > 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 40)
    assert_nothing_left(engine, frontend)


def test_a_stop_string_ends_the_answer_and_frees_the_engine(stack: tuple[Service, Frontend]) -> None:
    engine, frontend = stack
    request = greedy("1 2 3 4 5 6 7 8 9", 4000)
    request.stop.stop.append(" 1")
    answer = frontend.generation.Generate(request, timeout=TIMEOUT_S)
    assert answer.completions[0].stop_match.stop_string == " 1"
    assert " 1" not in answer.completions[0].text
    assert_nothing_left(engine, frontend)


def test_two_frontends_and_64_streams_of_which_20_are_cancelled(
    stack: tuple[Service, Frontend], embedded_model_dir: Path, tmp_path: Path
) -> None:
    engine, first = stack
    rng = random.Random(3)
    cancelled = set(rng.sample(range(64), 20))
    expected = first.generation.Generate(greedy("Stream number 1", 24), timeout=TIMEOUT_S).completions[0].text
    with running_stack(embedded_model_dir, tmp_path) as stack_of_second:
        second = stack_of_second.frontend(engine)
        second.wait_for_health(SERVING)
        plan = {index: (rng.randint(1, 6), (first, second)[index % 2]) for index in range(64)}

        def run(index: int) -> str | None:
            num_before_cancel, frontend = plan[index]
            request = greedy("Stream number 1", 4000 if index in cancelled else 24)
            call = frontend.generation.GenerateStream(request, timeout=TIMEOUT_S)
            text = ""
            for number, message in enumerate(call):
                text += message.delta.text
                if index in cancelled and number == num_before_cancel:
                    call.cancel()
                    return None
            return text

        with ThreadPoolExecutor(64) as executor:
            texts = list(executor.map(run, range(64)))
        assert {index for index, text in enumerate(texts) if text is None} == cancelled
        assert {text for text in texts if text is not None} == {expected}
        assert_nothing_left(engine, first, second)


@pytest.mark.parametrize(
    ("change", "code", "reason", "words"),
    [
        ({"token_ids": {"ids": [5] * 100_000}}, "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", "100000"),
        ({"token_ids": {"ids": [5, 4_000_000]}}, "INVALID_ARGUMENT", "FIELD_INVALID", "4000000"),
        ({"sampling": {"top_p": 7}}, "INVALID_ARGUMENT", "FIELD_INVALID", "sampling.top_p"),
        ({"model": "nobody"}, "NOT_FOUND", "MODEL_NOT_FOUND", "nobody"),
        ({"text": ""}, "INVALID_ARGUMENT", "FIELD_INVALID", "text"),
        ({"stop": {"max_tokens": 0}}, "INVALID_ARGUMENT", "FIELD_INVALID", "stop.max_tokens"),
        ({"text": "word " * 9000}, "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", "8192"),
    ],
)
def test_bad_input_gets_its_error_and_a_running_stream_is_untouched(
    stack: tuple[Service, Frontend], change: dict[str, object], code: str, reason: str, words: str
) -> None:
    engine, frontend = stack
    call = frontend.generation.GenerateStream(greedy("The sea is", 20), timeout=TIMEOUT_S)
    assert next(call).HasField("accepted")
    fields = change if {"text", "token_ids"} & set(change) else {"text": "hello", **change}
    with pytest.raises(grpc.RpcError) as caught:
        frontend.generation.Generate(GenerateRequest(**fields), timeout=TIMEOUT_S)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert any(detail.Unpack(info) for detail in status.details)
    assert (caught.value.code().name, info.reason) == (code, reason)
    assert words in caught.value.details()
    assert list(call)[-1].finished.usage.completion_tokens == 20
    assert_nothing_left(engine, frontend)


def test_garbage_on_both_ports_harms_nobody(stack: tuple[Service, Frontend]) -> None:
    import socket

    engine, frontend = stack
    call = frontend.generation.GenerateStream(greedy("The sea is", 20), timeout=TIMEOUT_S)
    next(call)
    for port in (engine.port, frontend.port):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(bytes(range(256)) * 16)
        raw = grpc.insecure_channel(f"127.0.0.1:{frontend.port}")
        with pytest.raises(grpc.RpcError):
            raw.unary_unary("/stepwire.v1.GenerationService/Generate")(b"\xff\xff\xff", timeout=TIMEOUT_S)
        raw.close()
    assert list(call)[-1].finished.usage.completion_tokens == 20
    assert_nothing_left(engine, frontend)


def test_a_deadline_ends_the_answer_and_frees_the_engine(stack: tuple[Service, Frontend]) -> None:
    engine, frontend = stack
    with pytest.raises(grpc.RpcError) as caught:
        list(frontend.generation.GenerateStream(greedy("The sea is", 4000), timeout=1.0))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_nothing_left(engine, frontend)


def test_the_other_services_tell_the_truth(stack: tuple[Service, Frontend]) -> None:
    _, frontend = stack
    model = frontend.models.ListModels(model_service_pb2.ListModelsRequest()).models[0]
    assert (model.architecture, model.max_model_len, model.vocab_size) == ("LlamaForCausalLM", 8192, 49152)
    info = frontend.models.GetServerInfo(model_service_pb2.GetServerInfoRequest())
    assert info.engines[0].state == common_pb2.ENGINE_STATE_RUNNING
    text = "Grüße, 世界 👋"
    encoding = frontend.tokenization.Tokenize(tokenization_service_pb2.TokenizeRequest(texts=[text])).encodings[0]
    request = tokenization_service_pb2.DetokenizeRequest(sequences=[common_pb2.TokenIds(ids=encoding.token_ids)])
    assert list(frontend.tokenization.Detokenize(request).texts) == [text]
