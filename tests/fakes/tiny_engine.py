"""An engine core over a tiny model, with the real scheduler and model runner, stepped until it is idle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine_core.config import EngineSettings
from engine_core.core import EngineCore
from engine_core.model_executor.in_process_executor import InProcessExecutor
from engine_core.resolved_config import ServedModel, resolve_config
from engine_core.scheduler.request import Request, RequestStatus, SamplingParams, StopConditions
from fakes.request_factory import make_request
from fakes.tiny_models import VOCAB_SIZE


class TinyEngine:
    """Small limits unless told otherwise."""

    def __init__(self, directory: Path, **settings) -> None:
        arguments = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "block_size": 4, "num_blocks": 60} | settings
        self.settings = EngineSettings(model=str(directory), device="cpu", **arguments)
        executor = InProcessExecutor(self.settings, directory, lambda _: None)
        num_blocks = executor.determine_num_blocks(self.settings.block_size)
        self.config = resolve_config(self.settings, ServedModel("m", "", ""), executor.model_info, num_blocks)
        executor.initialize_kv_cache(num_blocks, self.settings.block_size)
        self.core = EngineCore(executor, self.config, lambda: 0.0)
        self.scheduler = self.core.scheduler
        self.most_blocks = 0

    def run(self, *requests: Request) -> None:
        for request in requests:
            assert self.core.preprocess_add_request(request) is None
            self.core.add_request(request)
        while self.core.has_work:
            self.core.step()
            assert self.scheduler.check_integrity() == []
            held = [self.scheduler.kv_cache_manager.num_blocks(request.key) for request in requests]
            self.most_blocks = max(self.most_blocks, *held)
        assert {request.status for request in requests} == {RequestStatus.FINISHED_LENGTH_CAPPED}

    def shutdown(self) -> None:
        self.core.executor.shutdown()


def greedy(handle: int, prompt: list[int], max_tokens: int) -> Request:
    request = make_request(handle, prompt, stop=StopConditions(max_tokens=max_tokens))
    return replace(request, sampling=SamplingParams(temperature=0.0))


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
