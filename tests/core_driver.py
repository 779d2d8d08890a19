"""An EngineCore in the test's own thread, driven to the end of its requests: scheduler, cache and real model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from engine_core.__main__ import load_model
from engine_core.config import EngineSettings
from engine_core.core import EngineCore
from engine_core.scheduler.grammar import GrammarSpec
from engine_core.scheduler.output import EngineCoreOutput, FinishReason
from engine_core.scheduler.pooling import PoolingParams
from engine_core.scheduler.request import (
    NO_LOGPROBS,
    LogprobsParams,
    Request,
    RequestKey,
    SamplingParams,
    StopConditions,
)
from engine_core.startup import start_engine
from stepwire.packed_logprobs import PackedLogprobs


class CoreDriver:
    """Adds requests, steps until they are done, and collects their tokens."""

    def __init__(self, model_dir: Path, **settings: object) -> None:
        defaults: dict[str, object] = {"model": str(model_dir), "device": "cpu", "max_model_len": -1}
        engine_settings = EngineSettings(**{**defaults, **settings})  # type: ignore[arg-type]
        started = start_engine(engine_settings, load_model, lambda _: None, lambda: None, time.monotonic)
        self.core: EngineCore = started.core
        self.tokens: dict[RequestKey, list[int]] = {}
        self.finishes: dict[RequestKey, FinishReason] = {}
        # Of those that have ended.
        self.num_preemptions: dict[RequestKey, int] = {}
        self.logprobs_params: dict[RequestKey, LogprobsParams] = {}
        # In the order in which they came.
        self.logprobs: dict[RequestKey, list[PackedLogprobs]] = {}
        self.prompt_logprobs: dict[RequestKey, list[PackedLogprobs]] = {}
        self.pooled: dict[RequestKey, bytes] = {}
        self._num_requests = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        logprobs: LogprobsParams = NO_LOGPROBS,
        resumed: Sequence[int] = (),
        grammar_spec: GrammarSpec | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        pooling: PoolingParams | None = None,
    ) -> RequestKey:
        """Without eos ids the answer has all its tokens."""
        self._num_requests += 1
        request = Request(
            key=("test", self._num_requests),
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=list(prompt),
            sampling=sampling or SamplingParams(temperature=0.0),
            stop=StopConditions(max_tokens=max_tokens, ignore_eos=not eos_token_ids, eos_token_ids=eos_token_ids),
            arrival_time=time.monotonic(),
            logprobs=logprobs,
            output_token_ids=list(resumed),
            grammar_spec=grammar_spec,
            priority=priority,
            pooling=pooling,
        )
        self.logprobs_params[request.key] = logprobs
        assert self.core.preprocess_add_request(request) is None
        output = self.core.add_request(request)
        assert output is not None
        self._collect([output])
        return request.key

    def run(self) -> None:
        """Step until nothing is left; every block must be free then, and every invariant hold."""
        while self.core.has_work:
            outputs, _ = self.core.step()
            self._collect(outputs)
        assert self.core.scheduler.check_integrity() == []
        assert self.core.scheduler.kv_cache_manager.pool.num_used == 0

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """All prompts at once; their output tokens in order."""
        keys = [self.add(prompt, max_tokens) for prompt in prompts]
        self.run()
        assert all(self.finishes[key] is FinishReason.LENGTH for key in keys)
        return [self.tokens[key] for key in keys]

    def _collect(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.key not in self.finishes
            self.tokens.setdefault(output.key, []).extend(output.new_token_ids)
            for found, rows in ((self.logprobs, output.logprobs), (self.prompt_logprobs, output.prompt_logprobs)):
                found.setdefault(output.key, []).extend([rows] if rows is not None else [])
            if output.pooled is not None:
                assert output.finish is not None
                self.pooled[output.key] = output.pooled
            if output.finish is not None:
                self.finishes[output.key] = output.finish.reason
                self.num_preemptions[output.key] = output.finish.num_preemptions
