"""An answer over several calls, wherever they break: nothing missing, nothing twice, and no call too many."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import grpc
import pytest

from stepwire.v1 import chat_service_pb2, common_pb2, generation_service_pb2
from stepwire_client import CallError, Deadline
from stepwire_client.errors import ErrorDetails
from stepwire_client.resuming import DivergedError, ResumableStream

Request = generation_service_pb2.GenerateRequest
Response = generation_service_pb2.GenerateStreamResponse
ChatRequest = chat_service_pb2.ChatRequest
ChatResponse = chat_service_pb2.ChatStreamResponse

PROMPT = [1, 2, 3]
# Token 13 has no text of its own: it is the first half of a character.
ANSWER = [(10, "a"), (11, "bc"), (12, " "), (13, ""), (14, "é"), (15, "f")]
TEXT = "abc éf"
IDS = [token_id for token_id, _ in ANSWER]
FOREVER = Deadline(None)


def broken(code: str = "UNAVAILABLE", reason: str = "ENGINE_DEAD", **details: object) -> CallError:
    return CallError(grpc.StatusCode[code], "broken", reason, ErrorDetails(**details))  # type: ignore[arg-type]


class Server:
    """Answers a request with ANSWER, so many tokens a delta, behind what is resumed."""

    def __init__(self, tokens_per_delta: int = 1, answer: list[tuple[int, str]] | None = None) -> None:
        self.tokens_per_delta = tokens_per_delta
        self.answer = ANSWER if answer is None else answer
        self.requests: list[Request] = []

    def stream(self, request: Request) -> Iterator[Response]:
        self.requests.append(request)
        resumed = len(request.resume_output_token_ids.ids)
        yield Response(accepted=Response.Accepted(request_id="r1", seed=7, model="m", prompt_tokens=len(PROMPT)))
        if request.output.HasField("prompt_logprobs"):
            yield Response(prompt=Response.PromptInfo())
        echo = list(PROMPT) if request.output.echo_prompt and not resumed else []
        for pieces in self._deltas(self.answer[resumed:]):
            ids = [token_id for token_id, _ in pieces]
            rows = [common_pb2.TokenLogprobs(sampled={"token_id": one}) for one in ids]
            text = ("<prompt>" if echo else "") + "".join(text for _, text in pieces)
            shown = [*echo, *ids] if request.output.token_ids else []
            echo = []
            rows = rows if request.output.HasField("logprobs") else []
            yield Response(delta=Response.Delta(text=text, token_ids=shown, logprobs=rows))
        usage = common_pb2.Usage(prompt_tokens=len(PROMPT), completion_tokens=len(self.answer) - resumed)
        yield Response(finished=Response.Finished(reason=common_pb2.FINISH_REASON_STOP, usage=usage))

    def _deltas(self, tokens: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
        """A token whose character is unfinished goes with the next, as in a real answer."""
        group: list[tuple[int, str]] = []
        for token in tokens:
            group.append(token)
            if len(group) >= self.tokens_per_delta and token[1]:
                yield group
                group = []
        if group:
            yield group


def run(server: Server, request: Request, cuts: list[int], max_resumes: int = 9) -> list[Response]:
    """The whole answer; call i breaks after cuts[i] messages, the one after the last cut does not."""
    resumable: ResumableStream[Request, Response] = ResumableStream(request, max_resumes, FOREVER)
    given: list[Response] = []
    for cut in [*cuts, 1000]:
        messages = server.stream(resumable.request())
        try:
            for number, message in enumerate(messages):
                if number == cut:
                    resumable.delay_after(broken())
                    break
                given += resumable.take(message)
            else:
                return given
        except DivergedError:
            continue
    raise AssertionError("the last call breaks nowhere")


def check(given: list[Response], *, text: str = TEXT, ids: list[int] | None = None) -> None:
    assert [message.index for message in given] == list(range(len(given)))
    assert [message.WhichOneof("event") for message in given].count("accepted") == 1
    assert given[-1].finished.usage.completion_tokens == len(ANSWER)
    assert "".join(message.delta.text for message in given) == text
    assert [one for message in given for one in message.delta.token_ids] == (ids or [])


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 4])
def test_one_break_anywhere_changes_nothing(tokens_per_delta):
    for cut in range(1, 9):
        server = Server(tokens_per_delta)
        check(run(server, Request(text="x", output={"token_ids": True}), [cut]), ids=IDS)
        check(run(server, Request(text="x"), [cut]))


def test_two_breaks_anywhere_change_nothing():
    for cuts in product(range(1, 9), range(9)):
        check(run(Server(), Request(text="x", output={"token_ids": True}), list(cuts)), ids=IDS)
        check(run(Server(2), Request(text="x"), list(cuts)))


def test_the_next_server_may_cut_its_deltas_otherwise():
    for first, second in [(1, 3), (3, 1), (2, 4), (4, 1)]:
        for cut in range(2, 8):
            server = Server(first)
            resumable: ResumableStream[Request, Response] = ResumableStream(Request(text="x"), 1, FOREVER)
            given = [
                one for message in list(server.stream(resumable.request()))[:cut] for one in resumable.take(message)
            ]
            server.tokens_per_delta = second
            given = [message for message in given if message.WhichOneof("event") != "finished"]
            given += [one for message in server.stream(resumable.request()) for one in resumable.take(message)]
            assert "".join(message.delta.text for message in given) == TEXT


def test_log_probabilities_and_an_echoed_prompt_come_once():
    for cut in range(1, 9):
        output = {"token_ids": True, "logprobs": 0, "echo_prompt": True}
        given = run(Server(), Request(text="x", output=output), [cut])
        check(given, text="<prompt>" + TEXT, ids=[*PROMPT, *IDS])
        assert [row.sampled.token_id for message in given for row in message.delta.logprobs] == IDS


def test_what_is_known_of_the_prompt_comes_once():
    for cut in range(1, 8):
        server = Server()
        given = run(server, Request(text="x", output={"prompt_logprobs": 0}), [cut])
        assert [message.WhichOneof("event") for message in given].count("prompt") == 1
        assert server.requests[1].output.HasField("prompt_logprobs") == (cut < 2)


def test_a_resumed_call_has_the_seed_the_id_and_all_tokens_but_the_last_deltas():
    server = Server()
    request = Request(text="x", sampling={"temperature": 1.0})
    run(server, request, [4])
    assert server.requests[1].sampling.seed == 7
    assert server.requests[1].request_id == "r1"
    # Accepted and three deltas had come: the third may have been the last one of the answer.
    assert list(server.requests[1].resume_output_token_ids.ids) == IDS[:2]
    assert request == Request(text="x", sampling={"temperature": 1.0})


def test_an_end_that_was_lost_is_found_again():
    """All text has arrived and only Finished is missing: nothing is generated beyond the end."""
    given = run(Server(), Request(text="x", output={"token_ids": True}), [6])
    check(given, ids=IDS)
    assert given[-1].finished.reason == common_pb2.FINISH_REASON_STOP


def test_tokens_that_the_caller_had_resumed_itself_stay_in_front():
    server = Server()
    request = Request(text="x", resume_output_token_ids={"ids": IDS[:2]})
    given = run(server, request, [3])
    assert "".join(message.delta.text for message in given) == TEXT[3:]
    assert given[-1].finished.usage.completion_tokens == len(IDS) - 2
    assert list(server.requests[1].resume_output_token_ids.ids) == IDS[:3]


def test_where_a_server_goes_another_way_what_was_delivered_stays():
    server = Server()
    resumable: ResumableStream[Request, Response] = ResumableStream(Request(text="x"), 1, FOREVER)
    given = [one for message in list(server.stream(resumable.request()))[:3] for one in resumable.take(message)]
    resumable.delay_after(broken())
    server.answer = [(10, "a"), (99, "zz"), (98, "y")]
    with pytest.raises(DivergedError):
        [resumable.take(message) for message in server.stream(resumable.request())]
    given += [one for message in server.stream(resumable.request()) for one in resumable.take(message)]
    assert list(server.requests[-1].resume_output_token_ids.ids) == [10, 11]
    assert "".join(message.delta.text for message in given) == "abcy"


@pytest.mark.parametrize("answer", [ANSWER[:2], [*ANSWER[:2], (12, "")]])
def test_an_answer_that_ends_before_what_was_delivered_is_another_one(answer):
    server = Server()
    resumable: ResumableStream[Request, Response] = ResumableStream(Request(text="x"), 1, FOREVER)
    [resumable.take(message) for message in list(server.stream(resumable.request()))[:4]]
    resumable.delay_after(broken())
    server.answer = answer
    with pytest.raises(DivergedError):
        [resumable.take(message) for message in server.stream(resumable.request())]


def test_another_model_is_no_continuation():
    resumable: ResumableStream[Request, Response] = ResumableStream(Request(text="x"), 5, FOREVER)
    resumable.take(Response(accepted=Response.Accepted(model="m", prompt_tokens=3)))
    resumable.delay_after(broken())
    with pytest.raises(CallError) as caught:
        resumable.take(Response(accepted=Response.Accepted(model="other", prompt_tokens=3)))
    with pytest.raises(CallError, match="ENGINE_DEAD"):
        resumable.delay_after(caught.value)


def test_several_choices_are_refused():
    with pytest.raises(ValueError, match="4 choices"):
        ResumableStream(Request(text="x", sampling={"n": 4}), 1, FOREVER)


def accepted(max_resumes: int = 5, deadline: Deadline = FOREVER) -> ResumableStream[Request, Response]:
    resumable: ResumableStream[Request, Response] = ResumableStream(Request(text="x"), max_resumes, deadline)
    resumable.take(Response(accepted=Response.Accepted(request_id="r1")))
    return resumable


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("CANCELLED", ""),
        ("CANCELLED", "CANCELLED"),
        ("DEADLINE_EXCEEDED", "DEADLINE"),
        ("INVALID_ARGUMENT", "FIELD_INVALID"),
        ("INTERNAL", "REQUEST_FAILED"),
        ("RESOURCE_EXHAUSTED", "QUEUE_FULL"),
        ("ALREADY_EXISTS", "DUPLICATE_REQUEST"),
    ],
)
def test_other_errors_end_it(code, reason):
    with pytest.raises(CallError):
        accepted().delay_after(broken(code, reason))


def test_what_was_never_accepted_is_not_resumed():
    resumable: ResumableStream[Request, Response] = ResumableStream(Request(text="x"), 5, FOREVER)
    with pytest.raises(CallError):
        resumable.delay_after(broken(retry_after_s=0.1))


def test_a_slow_caller_is_given_another_stream_and_a_full_queue_another_moment():
    resumable = accepted()
    resumable.delay_after(broken("RESOURCE_EXHAUSTED", "SLOW_CLIENT"))
    resumable.delay_after(broken("RESOURCE_EXHAUSTED", "QUEUE_FULL", retry_after_s=1.0))
    resumable.delay_after(broken("ALREADY_EXISTS", "DUPLICATE_REQUEST"))


def test_it_waits_as_the_server_says_and_otherwise_longer_each_time():
    resumable = accepted()
    assert resumable.delay_after(broken(retry_after_s=1.5)) == 1.5
    assert resumable.delay_after(broken(retry_after_s=1.5, pushback_ms=300)) == 0.3
    waits = [resumable.delay_after(broken()) for _ in range(3)]
    assert all(longer >= shorter for shorter, longer in pairwise(waits))
    assert waits[-1] <= 2.0


def test_a_server_that_pushes_back_for_good_is_left_alone():
    with pytest.raises(CallError):
        accepted().delay_after(broken(pushback_ms=-1))


def test_it_gives_up_after_so_many_calls_and_counts_the_tokens_of_all():
    server = Server()
    resumable: ResumableStream[Request, Response] = ResumableStream(Request(text="x"), 1, FOREVER)
    [resumable.take(message) for message in list(server.stream(resumable.request()))[:3]]
    resumable.delay_after(broken())
    [resumable.take(message) for message in list(server.stream(resumable.request()))[:3]]
    with pytest.raises(CallError) as caught:
        resumable.delay_after(broken(metadata={"tokens_emitted": "1"}))
    assert caught.value.tokens_emitted == 3


def test_it_never_waits_beyond_the_deadline():
    now = [0.0]
    resumable = accepted(deadline=Deadline.after(10, clock=lambda: now[0]))
    assert resumable.delay_after(broken(retry_after_s=9.0)) == 9.0
    now[0] = 9.0
    assert resumable.deadline.remaining() == 1.0
    with pytest.raises(CallError):
        resumable.delay_after(broken(retry_after_s=1.0))


def test_only_a_request_whose_end_nobody_has_seen_is_aborted():
    resumable = accepted()
    resumable.delay_after(broken())
    assert resumable.request_id_to_abort == ""
    resumable.delay_after(broken(reason=""))
    assert resumable.request_id_to_abort == "r1"
    resumable.delay_after(broken("ALREADY_EXISTS", "DUPLICATE_REQUEST"))
    assert resumable.request_id_to_abort == "r1"


def test_a_chat_goes_on_inside_a_call():
    """A server that repeats the beginning of a call gives it another id, which the caller must not see."""

    def delta(token_id: int, **parts: object) -> ChatResponse:
        return ChatResponse(delta={"token_ids": [token_id], **parts})  # type: ignore[typeddict-item]

    def call(token_id: int, **call: object) -> ChatResponse:
        return delta(token_id, tool_calls=[call])

    def begin(identity: str) -> ChatResponse:
        return call(12, id=identity, name="add", arguments='{"a"')

    start = [ChatResponse(accepted={"request_id": "c"}), delta(10, reasoning="Hm"), delta(11, content="So: ")]
    end = [
        call(13, arguments=": 1"),
        call(14, arguments="}"),
        ChatResponse(finished={"usage": {"completion_tokens": 3}}),
    ]
    resumable: ResumableStream[ChatRequest, ChatResponse] = ResumableStream(ChatRequest(), 1, FOREVER)
    resumable.request()
    given = [one for message in [*start, begin("x")] for one in resumable.take(message)]
    resumable.delay_after(broken())
    assert list(resumable.request().resume_output_token_ids.ids) == [10, 11]
    given += [one for message in [start[0], begin("y"), *end] for one in resumable.take(message)]
    calls = [call for message in given for call in message.delta.tool_calls]
    assert [call.id for call in calls] == ["x", "", ""]
    assert "".join(call.arguments for call in calls) == '{"a": 1}'
    assert "".join(message.delta.content for message in given) == "So: "
    assert "".join(message.delta.reasoning for message in given) == "Hm"
    assert not any(message.delta.token_ids for message in given)
    usage = given[-1].finished.usage
    assert (usage.completion_tokens, usage.reasoning_tokens) == (5, 1)
