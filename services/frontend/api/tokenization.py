"""stepwire.v1.TokenizationService: the tokenizer that Generate uses, for clients that count and cut themselves.

Everything that grows with the message, the building of the answer too, happens in the threads that encode prompts; the
limits here keep one call from holding such a thread, or the interpreter, for long.
"""

from __future__ import annotations

from functools import partial

from frontend.api.answering import Context, answers_errors, caller_of, client_class_of
from frontend.api.streaming import writing
from frontend.api.tokenizer_chunks import tokenizer_chunks
from frontend.chat.preparation import with_fields
from frontend.chat.service import prepare_in_thread
from frontend.llm_frontend import LLMFrontend
from frontend.tokenizer import Encoding, Tokenizer
from stepwire.errors import FieldViolation, InvalidRequestError
from stepwire.v1 import tokenization_service_pb2 as pb
from stepwire.v1 import tokenization_service_pb2_grpc as pb_grpc

# Of all texts of a call together: a second or two of encoding.
MAX_CHARS = 1024 * 1024
# Python builds the offsets, at ten times the cost of the ids and with the GIL held.
MAX_CHARS_WITH_OFFSETS = 256 * 1024
# Of all sequences of a call together.
MAX_TOKEN_IDS = 256 * 1024
# Texts or sequences of a call: empty ones cost time as well.
MAX_ITEMS = 16 * 1024


class TokenizationService(pb_grpc.TokenizationServiceServicer):
    """Admission and drain as for Generate; no engine is needed."""

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend

    @answers_errors
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        with self._frontend.tokenization(caller_of(context), client_class_of(context)) as model:
            model.input_processor.check_model(request.model)
            work = partial(tokenize, request, model.tokenizer)
            response = await model.input_processor.in_thread(work)
        response.max_model_len = model.facts.max_model_len
        return response

    @answers_errors
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        with self._frontend.tokenization(caller_of(context), client_class_of(context)) as model:
            model.input_processor.check_model(request.model)
            work = partial(detokenize, request, model.tokenizer, model.facts.vocab_size)
            return await model.input_processor.in_thread(work)

    @answers_errors
    async def RenderChat(self, request: pb.RenderChatRequest, context: Context) -> pb.RenderChatResponse:
        with self._frontend.tokenization(caller_of(context), client_class_of(context)) as model:
            try:
                prepared = await prepare_in_thread(request.chat, model)
                return await model.input_processor.in_thread(
                    partial(encode_chat, prepared.request.text, model.tokenizer)
                )
            except InvalidRequestError as error:
                fields = (FieldViolation(f"chat.{item.field}", item.description) for item in error.violations)
                raise with_fields(error, fields) from error

    @answers_errors
    async def GetTokenizer(  # type: ignore[override]  # the stubs know the generator style only
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> None:
        with self._frontend.tokenization(caller_of(context), client_class_of(context)) as model:
            model.input_processor.check_model(request.model)
            chunks = await tokenizer_chunks(model)
        # Without a permit: all calls send the same bytes, and a slow reader keeps nobody out.
        with writing():
            for data, sha256 in chunks:
                await context.write(pb.GetTokenizerResponse(data=data, sha256=sha256))


def encode_chat(text: str, tokenizer: Tokenizer) -> pb.RenderChatResponse:
    _check_limit("messages", "characters", len(text), MAX_CHARS)
    return pb.RenderChatResponse(text=text, token_ids=tokenizer.encode(text, add_special_tokens=False))


def tokenize(request: pb.TokenizeRequest, tokenizer: Tokenizer) -> pb.TokenizeResponse:
    _check_limit("texts", "texts", len(request.texts), MAX_ITEMS)
    texts = list(request.texts)
    max_chars = MAX_CHARS_WITH_OFFSETS if request.return_offsets else MAX_CHARS
    _check_limit("texts", "characters", sum(map(len, texts)), max_chars)
    encodings = tokenizer.encode_batch(
        texts,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
        has_offsets=request.return_offsets,
    )
    return pb.TokenizeResponse(encodings=map(_to_message, encodings))


def _to_message(encoding: Encoding) -> pb.TokenizeResponse.Encoding:
    return pb.TokenizeResponse.Encoding(
        token_ids=encoding.token_ids,
        offset_starts=(start for start, _ in encoding.offsets),
        offset_ends=(end for _, end in encoding.offsets),
    )


def detokenize(request: pb.DetokenizeRequest, tokenizer: Tokenizer, vocab_size: int) -> pb.DetokenizeResponse:
    _check_limit("sequences", "sequences", len(request.sequences), MAX_ITEMS)
    _check_limit("sequences", "token ids", sum(len(sequence.ids) for sequence in request.sequences), MAX_TOKEN_IDS)
    sequences = [list(sequence.ids) for sequence in request.sequences]
    _check_token_ids(sequences, vocab_size)
    skip_special_tokens = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return pb.DetokenizeResponse(texts=tokenizer.decode_batch(sequences, skip_special_tokens=skip_special_tokens))


def _check_limit(field: str, what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError.of_field(field, f"{count} {what}, at most {limit} are allowed in one call")


def _check_token_ids(sequences: list[list[int]], vocab_size: int) -> None:
    for index, sequence in enumerate(sequences):
        largest = max(sequence, default=0)
        if largest >= vocab_size:
            raise InvalidRequestError.of_field(
                f"sequences[{index}].ids", f"token id {largest} is outside the vocabulary of {vocab_size} tokens"
            )
