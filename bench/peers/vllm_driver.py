"""vLLM in process, as a driver: run by vLLM's own interpreter with the arguments MODEL DTYPE MAX_NUM_SEQS PROMPTS."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.driver import Answers, serve


def main() -> None:
    model, dtype, max_num_seqs, prompts_file = sys.argv[1:]
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, max_model_len=2048, max_num_seqs=int(max_num_seqs), disable_log_stats=False)

    def generate(prompts: list[list[int]], max_tokens: int) -> Answers:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        metrics = [output.metrics for output in outputs]
        num_gaps = max_tokens - 1
        return Answers(
            num_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
            ttfts_s=[metric.first_token_latency for metric in metrics],
            itls_s=[(metric.last_token_ts - metric.first_token_ts) / num_gaps for metric in metrics]
            if num_gaps
            else [],
        )

    serve(generate, Path(prompts_file))


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main()
