"""stepwire in one process: `LLM(model).generate(prompts)`. The frontend's halves around an EngineCore.

Nothing here knows text or models: what differs from the service is only who turns the loop.
"""

from __future__ import annotations

from offline.llm import LLM
from offline.llm_engine import LLMEngine
from offline.outputs import CompletionOutput, Logprob, RequestOutput
from offline.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
