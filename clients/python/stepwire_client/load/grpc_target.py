"""stepwire's GenerationService as the target of a load.

It shares the machine's cores with the server, so nothing is done per message but noting the time: texts are not read,
and the number of tokens comes from the usage in the last message. What is left is gRPC's own cost, some 50 us each.
"""

from __future__ import annotations

import time

import grpc.aio

from stepwire.v1 import common_pb2, generation_service_pb2, generation_service_pb2_grpc
from stepwire_client.credentials import NO_CREDENTIALS, Credentials
from stepwire_client.errors import CallError
from stepwire_client.load.reply import Reply, RequestFailed
from stepwire_client.load.workload import LoadRequest

_COMPLETE = {common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH}


class GrpcTarget:
    """One channel to one frontend; greedy requests."""

    def __init__(
        self, target: str, *, model: str, ignore_eos: bool, timeout_s: float, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self._model = model
        self._ignore_eos = ignore_eos
        self._timeout_s = timeout_s
        self._channel = credentials.aio_channel(target)
        self._metadata = credentials.metadata
        self._stub = generation_service_pb2_grpc.GenerationServiceStub(self._channel)

    async def complete(self, request: LoadRequest, reply: Reply) -> None:
        call = self._stub.GenerateStream(self._message(request), timeout=self._timeout_s, metadata=self._metadata)
        note, now, finished = reply.chunk_times.append, time.perf_counter, None
        try:
            async for response in call:
                if response.HasField("delta"):
                    note(now())
                elif response.HasField("finished"):
                    finished = response.finished
        except grpc.aio.AioRpcError as error:
            failure = CallError.from_rpc_error(error)
            raise RequestFailed(failure.reason or failure.code.name, failure.message) from error
        if finished is None:
            raise RequestFailed("INCOMPLETE", "the stream ended without a Finished")
        if finished.reason not in _COMPLETE:
            raise RequestFailed(common_pb2.FinishReason.Name(finished.reason))
        reply.num_tokens = finished.usage.completion_tokens

    async def close(self) -> None:
        await self._channel.close(None)

    def _message(self, request: LoadRequest) -> generation_service_pb2.GenerateRequest:
        return generation_service_pb2.GenerateRequest(
            model=self._model,
            token_ids=common_pb2.TokenIds(ids=request.prompt_token_ids),
            sampling=common_pb2.SamplingParams(temperature=0),
            stop=common_pb2.StopConditions(max_tokens=request.max_tokens, ignore_eos=self._ignore_eos),
        )
