"""A threaded gRPC server with the public services, scripted by a test; answers a prompt with its words in capitals.

The token id of a word is its place. What is resumed is left out, as the real server does it.

A prompt of token ids is answered with max_tokens words, and counts as the text of its ids. A chat answers what was said
last, after some reasoning, and calls the first of its tools.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stepwire import grpc_options
from stepwire.errors import StepwireError
from stepwire.grpc_errors import abort_sync, trailers
from stepwire.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    common_pb2,
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    tokenization_service_pb2,
    tokenization_service_pb2_grpc,
)

Response = generation_service_pb2.GenerateStreamResponse
ChatEvent = chat_service_pb2.ChatStreamResponse
SERVICE = "stepwire.v1.GenerationService"


def token_logprobs(word: str, logprob: float) -> common_pb2.TokenLogprobs:
    sampled = common_pb2.Logprob(token_id=7, logprob=logprob, rank=2, token_bytes=word.encode())
    top = [common_pb2.Logprob(token_id=8 + place, logprob=-place, token_bytes=b"\xf0\x9f") for place in range(6)]
    return common_pb2.TokenLogprobs(sampled=sampled, top=top)


# Calls of both clients that only look something up, each with what it needs.
SHORT_CALLS = {
    "render_chat": (chat_service_pb2.ChatRequest(messages=[{"content": [{"text": "a"}]}]),),
    "tokenize": (["ab"],),
    "detokenize": ([[97]],),
    "tokenizer_archive": (),
    "models": (),
    "abort": (["r1"],),
    "health": (),
}


class FakePublicServer(
    generation_service_pb2_grpc.GenerationServiceServicer,
    chat_service_pb2_grpc.ChatServiceServicer,
    embedding_service_pb2_grpc.EmbeddingServiceServicer,
    tokenization_service_pb2_grpc.TokenizationServiceServicer,
    model_service_pb2_grpc.ModelServiceServicer,
):
    """What the next call gets: an answer, `error`, or, with `hangs`, one delta and then nothing until cancelled."""

    def __init__(self) -> None:
        self.target = ""
        self.error: StepwireError | None = None
        # What a proxy may do to an error: a status of its own over the details of ours.
        self.status_over_error: tuple[grpc.StatusCode, str] | None = None
        self.failing_prompts: dict[str, StepwireError] = {}
        self.hangs = False
        # Streams that break, in order: after how many deltas, and how.
        self.breaks: list[tuple[int, StepwireError]] = []
        self.finish_reason = common_pb2.FINISH_REASON_LENGTH
        self.was_called = threading.Event()
        self.was_cancelled = threading.Event()
        self.requests: list[generation_service_pb2.GenerateRequest] = []
        self.aborted: list[str] = []
        # Sent with every generation, before and after the answer.
        self.headers: tuple[tuple[str, str], ...] = ()
        self.trailers: tuple[tuple[str, str], ...] = ()
        self.chats: list[chat_service_pb2.ChatRequest] = []
        self.embeds: list[embedding_service_pb2.EmbedRequest] = []
        # Of each request that came with one.
        self.client_classes: list[str] = []
        self.num_concurrent = 0
        self.max_concurrent = 0
        self.health = health.HealthServicer()
        self._lock = threading.Lock()

    def GenerateStream(self, request, context) -> Iterator[Response]:
        gone = self._until_gone(context)
        self._receive(request, context)
        yield Response(index=0, accepted=Response.Accepted(request_id="r1", prompt_tokens=3, seed=7))
        if request.output.HasField("prompt_logprobs"):
            rows = [common_pb2.TokenLogprobs(), token_logprobs("[b]", -1.25)]
            yield Response(prompt=Response.PromptInfo(prompt_logprobs=rows))
        num_deltas, error = self.breaks.pop(0) if self.breaks else (-1, None)
        for choice in range(max(1, request.sampling.n)):
            for place, word in enumerate(self._words(request)):
                if place < len(request.resume_output_token_ids.ids):
                    continue
                if error is not None and place == num_deltas:
                    abort_sync(context, error)
                rows = [token_logprobs(word, -0.5 - choice)] if request.output.HasField("logprobs") else []
                ids = [place] if request.output.token_ids else []
                yield Response(delta=Response.Delta(choice=choice, text=word, token_ids=ids, logprobs=rows))
                if self.hangs:
                    gone.wait()
            yield Response(finished=self._finished(request, choice))
        if error is not None:
            abort_sync(context, error)

    def Generate(self, request, context):
        with self._lock:
            self.num_concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self.num_concurrent)
        try:
            self._receive(request, context)
            if self.hangs:
                self._until_gone(context).wait()
        finally:
            with self._lock:
                self.num_concurrent -= 1
        completion = generation_service_pb2.GenerateResponse.Completion(
            text="".join(self._words(request)), reason=common_pb2.FINISH_REASON_LENGTH
        )
        return generation_service_pb2.GenerateResponse(request_id=request.request_id, completions=[completion])

    def Abort(self, request, context):
        self.aborted += request.request_ids
        return generation_service_pb2.AbortResponse(inactive_request_ids=request.request_ids)

    def ChatStream(self, request, context) -> Iterator[ChatEvent]:
        self._note_class(context)
        self.chats.append(request)
        self._fail_if_told(context)
        yield ChatEvent(accepted=ChatEvent.Accepted(request_id="c1", prompt_tokens=3))
        num_deltas, error = self.breaks.pop(0) if self.breaks else (-1, None)
        words = request.messages[-1].content[0].text.split()
        deltas = [{"reasoning": "Hm."}, *({"content": word.upper() + " "} for word in words)]
        for place, delta in enumerate(deltas):
            if place < len(request.resume_output_token_ids.ids):
                continue
            if error is not None and place == num_deltas:
                abort_sync(context, error)
            yield ChatEvent(delta=ChatEvent.Delta(**delta, token_ids=[place] if request.output.token_ids else []))
        reason = common_pb2.FINISH_REASON_STOP
        if request.tools:
            reason = common_pb2.FINISH_REASON_TOOL_CALLS
            first = chat_service_pb2.ToolCall(id="t1", name=request.tools[0].name)
            for call in (first, *(chat_service_pb2.ToolCall(arguments=text) for text in ('{"a": ', "1}"))):
                yield ChatEvent(delta=ChatEvent.Delta(tool_calls=[call]))
        yield ChatEvent(finished=ChatEvent.Finished(reason=reason, usage=common_pb2.Usage(prompt_tokens=3)))

    def Chat(self, request, context):
        self._note_class(context)
        self.chats.append(request)
        self._fail_if_told(context)
        message = chat_service_pb2.Message(content=[{"text": request.messages[-1].content[0].text.upper()}])
        return chat_service_pb2.ChatResponse(choices=[chat_service_pb2.ChatResponse.Choice(message=message)])

    def Embed(self, request, context):
        """A text's vector is the number of its characters, halved, and that of its words."""
        self._note_class(context)
        self.embeds.append(request)
        self._fail_if_told(context)
        answer = embedding_service_pb2.EmbedResponse
        vectors = [answer.Embedding(values=[len(one.text) / 2, len(one.text.split())]) for one in request.inputs]
        usage = common_pb2.Usage(prompt_tokens=3 * len(vectors))
        return answer(request_id=request.request_id, embeddings=vectors, usage=usage)

    def RenderChat(self, request, context):
        self._fail_if_told(context)
        return tokenization_service_pb2.RenderChatResponse(text=f"<{request.chat.messages[0].content[0].text}>")

    def GetTokenizer(self, request, context):
        self._fail_if_told(context)
        yield tokenization_service_pb2.GetTokenizerResponse(data=b"PK")
        yield tokenization_service_pb2.GetTokenizerResponse(data=b"zip", sha256="0" * 64)

    def Detokenize(self, request, context):
        self._fail_if_told(context)
        texts = ["".join(map(chr, sequence.ids)) for sequence in request.sequences]
        return tokenization_service_pb2.DetokenizeResponse(texts=texts)

    def Tokenize(self, request, context):
        self._fail_if_told(context)
        encodings = [
            tokenization_service_pb2.TokenizeResponse.Encoding(
                token_ids=map(ord, text),
                offset_starts=range(len(text)) if request.return_offsets else (),
                offset_ends=range(1, len(text) + 1) if request.return_offsets else (),
            )
            for text in request.texts
        ]
        return tokenization_service_pb2.TokenizeResponse(encodings=encodings, max_model_len=64)

    def ListModels(self, request, context):
        self._fail_if_told(context)
        model = model_service_pb2.Model(id="tiny", max_model_len=64, vocab_size=128, architecture="FakeForCausalLM")
        return model_service_pb2.ListModelsResponse(models=[model])

    def set_serving(self, is_serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        self.health.set(SERVICE, states.SERVING if is_serving else states.NOT_SERVING)

    def _receive(self, request, context) -> None:
        self._note_class(context)
        with self._lock:
            self.requests.append(request)
        # Told before: whoever hears of the call may change what the next one gets.
        error = self.error
        self.was_called.set()
        self._fail(context, error)
        context.send_initial_metadata(self.headers)
        context.set_trailing_metadata(self.trailers)
        prompt = request.text or " ".join(map(str, request.token_ids.ids))
        if prompt in self.failing_prompts:
            abort_sync(context, self.failing_prompts[prompt])

    def _note_class(self, context) -> None:
        with self._lock:
            self.client_classes += [
                value for key, value in context.invocation_metadata() if key == "x-gateway-inference-fairness-id"
            ]

    def _fail_if_told(self, context) -> None:
        self._fail(context, self.error)

    def _fail(self, context, error: StepwireError | None) -> None:
        if error is not None and self.status_over_error is not None:
            context.set_trailing_metadata(trailers(error))
            context.abort(*self.status_over_error)
        if error is not None:
            abort_sync(context, error)

    def _until_gone(self, context) -> threading.Event:
        """Set when the call is over; registered before the first answer, after which a cancel may come any time."""
        gone = threading.Event()

        def end() -> None:
            gone.set()
            if self.hangs:
                self.was_cancelled.set()

        if not context.add_callback(end):
            end()
        return gone

    @staticmethod
    def _words(request) -> list[str]:
        words = ["word"] * request.stop.max_tokens if request.HasField("token_ids") else request.text.split()
        return [word.upper() + " " for word in words]

    def _finished(self, request, choice: int) -> Response.Finished:
        finished = Response.Finished(choice=choice, reason=self.finish_reason)
        if choice == max(1, request.sampling.n) - 1:
            finished.usage.prompt_tokens = 3
            num_resumed = len(request.resume_output_token_ids.ids)
            finished.usage.completion_tokens = len(self._words(request)) - num_resumed
        if request.output.timings:
            finished.timings.ttft_ns = 12_000_000
        return finished


@contextmanager
def running(port: int = 0) -> Iterator[FakePublicServer]:
    """The server on a loopback port (0 = any free one), with health and reflection."""
    fake = FakePublicServer()
    server = grpc.server(futures.ThreadPoolExecutor(16), options=grpc_options.SERVER)
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    chat_service_pb2_grpc.add_ChatServiceServicer_to_server(fake, server)
    embedding_service_pb2_grpc.add_EmbeddingServiceServicer_to_server(fake, server)
    tokenization_service_pb2_grpc.add_TokenizationServiceServicer_to_server(fake, server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    reflection.enable_server_reflection([SERVICE, reflection.SERVICE_NAME], server)
    fake.set_serving(True)
    fake.target = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(None).wait()
