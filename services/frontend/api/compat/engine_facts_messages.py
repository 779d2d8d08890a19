"""What is served here, by which engines and how busy they are, as vLLM's protocol tells it. Cached facts alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from frontend.config import FrontendSettings
from frontend.engine_client.connection import EngineConnection
from frontend.engine_client.engine_facts import EngineFacts, EngineLoad, EngineState
from frontend.serving_model import ServingModel
from stepwire import __version__

# By this gateways know what they talk to.
SERVER_TYPE = "vllm-grpc"


def to_model_info(model: ServingModel, settings: FrontendSettings) -> Any:
    facts = model.facts
    return pb.GetModelInfoResponse(
        model_path=facts.model,
        is_generation=True,
        max_context_length=facts.max_model_len,
        vocab_size=facts.vocab_size,
        served_model_name=facts.model,
        tokenizer_path=_tokenizer_path(facts, settings),
        architectures=[facts.architecture],
        eos_token_ids=model.tokenizer.eos_token_ids,
        # One is for the output.
        max_req_input_len=facts.max_model_len - 1,
        default_sampling_params_json=json.dumps(dataclasses.asdict(model.tokenizer.defaults)),
    )


def to_server_info(connections: Sequence[EngineConnection], num_in_flight: int, uptime_s: float) -> Any:
    """Raises nothing: without engines it says so by zeros."""
    available = [connection for connection in connections if connection.is_available]
    facts = [facts for connection in available if (facts := connection.facts) is not None]
    states = {connection.engine_state for connection in available}
    return pb.GetServerInfoResponse(
        active_requests=num_in_flight,
        is_paused=states == {EngineState.PAUSED},
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=max((one.data_parallel_size for one in facts), default=1),
        block_size=max((one.block_size for one in facts), default=0),
        model_dtype=facts[0].dtype if facts else "",
        max_num_seqs=sum(one.max_num_seqs for one in facts),
    )


def to_loads(connections: Sequence[EngineConnection], rank: int | None) -> Any:
    """One entry for each rank; engines of the same one are summed up."""
    by_rank: dict[int, list[tuple[EngineFacts, EngineLoad]]] = {}
    for connection in connections:
        facts = connection.facts
        if connection.is_available and facts is not None and rank in (None, facts.data_parallel_rank):
            by_rank.setdefault(facts.data_parallel_rank, []).append((facts, connection.load))
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=__version__,
        dp_rank_count=len(by_rank),
        loads=[_load(one, by_rank[one]) for one in sorted(by_rank)],
    )


def _load(rank: int, engines: Sequence[tuple[EngineFacts, EngineLoad]]) -> Any:
    running = sum(load.running for _, load in engines)
    waiting = sum(load.waiting for _, load in engines)
    return pb.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        max_total_num_tokens=sum(facts.kv_cache_tokens for facts, _ in engines),
        max_running_requests=sum(facts.max_num_seqs for facts, _ in engines),
    )


def _tokenizer_path(facts: EngineFacts, settings: FrontendSettings) -> str:
    """For clients on this machine; all others use GetTokenizer."""
    path = Path(settings.tokenizer) if settings.tokenizer else settings.cache_dir / facts.tokenizer_sha256
    return str(path)
