"""stepwire.v1.ModelService: what is served here, and the engines behind it."""

from __future__ import annotations

from frontend.api.answering import Context, answers_errors
from frontend.engine_client.availability import describe_state
from frontend.engine_client.connection import EngineConnection
from frontend.input_processor.sampling import MAX_N
from frontend.llm_frontend import LLMFrontend
from stepwire import __version__
from stepwire.v1 import common_pb2
from stepwire.v1 import model_service_pb2 as pb
from stepwire.v1 import model_service_pb2_grpc as pb_grpc

# Grows by one with every addition to the public API.
API_REVISION = 3
MIN_CLIENT_REVISION = 1


class ModelService(pb_grpc.ModelServiceServicer):
    """Answers from what the engines said when they were attached."""

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend

    @answers_errors
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._model()])

    @answers_errors
    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        self._frontend.model.input_processor.check_model(request.model)
        return pb.GetModelResponse(model=self._model())

    @answers_errors
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version=__version__,
            api_revision=API_REVISION,
            min_client_revision=MIN_CLIENT_REVISION,
            instance_id=self._frontend.instance_id,
            engines=[_engine(connection) for connection in self._frontend.pool.connections],
        )

    def _model(self) -> pb.Model:
        model = self._frontend.model
        facts = model.facts
        chat = model.chat
        capabilities = pb.Model.Capabilities(
            chat=chat.has_template,
            embeddings=bool(facts.embedding_dimensions),
            # Without a parser calls can still be required, which a grammar makes sure of.
            tools=chat.has_template
            and (chat.tool_parser is not None or "json_schema" in facts.structured_output_kinds),
            tool_parser=chat.tool_parser or "",
            reasoning_parser=chat.reasoning_parser or "",
            max_logprobs=facts.max_logprobs,
            max_n=min(MAX_N, self._frontend.settings.max_concurrent_requests),
            resume=True,
            structured_output_kinds=facts.structured_output_kinds,
        )
        return pb.Model(
            id=facts.model,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=model.tokenizer.eos_token_ids,
            architecture=facts.architecture,
            dtype=facts.dtype,
            tokenizer_sha256=facts.tokenizer_sha256,
            revision=facts.revision,
            capabilities=capabilities,
        )


def _engine(connection: EngineConnection) -> pb.GetServerInfoResponse.EngineInfo:
    facts, load = connection.facts, connection.load
    info = pb.GetServerInfoResponse.EngineInfo(
        engine_id=connection.engine_id,
        state=common_pb2.EngineState.Value(f"ENGINE_STATE_{connection.engine_state.name}"),
        requests_running=load.running,
        requests_waiting=load.waiting,
    )
    if not connection.is_available:
        info.detail = describe_state(connection)
    if facts is not None:
        info.kv_cache_tokens = facts.kv_cache_tokens
        info.block_size = facts.block_size
        info.max_num_seqs = facts.max_num_seqs
        info.weight_version = facts.weight_version
    return info
