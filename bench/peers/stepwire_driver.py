"""stepwire in process, as a driver: the arguments are those of `bench.engine_flags.settings` as JSON, and PROMPTS."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench import engine_flags
from bench.peers.driver import Answers, serve
from offline import LLM, SamplingParams


def main() -> None:
    changes, prompts_file = json.loads(sys.argv[1]), Path(sys.argv[2])
    with LLM(**{**engine_flags.SETTINGS, **changes}) as llm:

        def generate(prompts: list[list[int]], max_tokens: int) -> Answers:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return Answers(sum(len(output.outputs[0].token_ids) for output in outputs), [], [])

        serve(generate, prompts_file)


if __name__ == "__main__":
    main()
