"""stepwire.v1.TokenizationService: the tokenizer that Generate uses, for clients that count and cut themselves."""

from __future__ import annotations

import asyncio

from frontend.api.answering import Context, answers_errors
from frontend.llm_frontend import LLMFrontend
from frontend.tokenizer import Encoding
from stepwire.errors import InvalidRequestError
from stepwire.v1 import tokenization_service_pb2 as pb
from stepwire.v1 import tokenization_service_pb2_grpc as pb_grpc


class TokenizationService(pb_grpc.TokenizationServiceServicer):
    """Work is done in threads: a long text must not hold up the streams on the loop."""

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend

    @answers_errors
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        model = self._frontend.model
        model.check_name(request.model)
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        encodings = await asyncio.to_thread(
            model.tokenizer.encode_batch, list(request.texts), add_special_tokens=add_special_tokens
        )
        return pb.TokenizeResponse(
            encodings=[_to_message(encoding, has_offsets=request.return_offsets) for encoding in encodings],
            max_model_len=model.facts.max_model_len,
        )

    @answers_errors
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        model = self._frontend.model
        model.check_name(request.model)
        sequences = [list(sequence.ids) for sequence in request.sequences]
        _check_token_ids(sequences, model.facts.vocab_size)
        skip_special_tokens = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def decode_all() -> list[str]:
            return [model.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

        return pb.DetokenizeResponse(texts=await asyncio.to_thread(decode_all))


def _to_message(encoding: Encoding, *, has_offsets: bool) -> pb.TokenizeResponse.Encoding:
    message = pb.TokenizeResponse.Encoding(token_ids=encoding.token_ids)
    if has_offsets:
        message.offset_starts.extend(start for start, _ in encoding.offsets)
        message.offset_ends.extend(end for _, end in encoding.offsets)
    return message


def _check_token_ids(sequences: list[list[int]], vocab_size: int) -> None:
    for index, sequence in enumerate(sequences):
        largest = max(sequence, default=0)
        if largest >= vocab_size:
            raise InvalidRequestError.of_field(
                f"sequences[{index}].ids", f"token id {largest} is outside the vocabulary of {vocab_size} tokens"
            )
