"""What bfloat16 loses: behind each token of a text, the likeliest next one is nearly always float32's.

Prompts are computed in parts of two lengths: few rows and many take different kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.quality import TEXT, agreement, reading_of
from fakes.tiny_models import load_reference
from offline.llm import LLM
from offline.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

AT_LEAST = 0.97
MAX_CHARS = 6000


@pytest.mark.parametrize("tokens_a_step", [64, 2048])
def test_the_likeliest_token_is_that_of_transformers_in_float32(embedded_model_dir: Path, tokens_a_step: int) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory": "256MiB", "max_model_len": 2048}
    budget = {"max_num_batched_tokens": tokens_a_step, "max_num_seqs": 8}
    with LLM(str(embedded_model_dir), **settings, **budget) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        output = llm.generate(TEXT.read_text(encoding="utf-8")[:MAX_CHARS], params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None, output.error
    found = reading_of(output.prompt_token_ids, output.prompt_logprobs)
    assert len(found.likeliest) > 1000
    with torch.inference_mode():
        logits = load_reference(embedded_model_dir)(torch.tensor([output.prompt_token_ids])).logits[0, :-1]
    expected = type(found)(logits.argmax(dim=-1).tolist(), 0.0)
    assert agreement(found, expected) >= AT_LEAST
