"""What fewer bits cost: perplexity over a fixed text, and how often the likeliest next token is that of float32.

The text is the first chapter of Alice's Adventures in Wonderland, in the public domain (bench/quality_text.txt). It is
teacher-forced: each token is judged behind the text as it is, by the engine's own log-probabilities of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import engine_flags, rows
from bench.rows import Row
from offline.llm import LLM
from offline.outputs import PositionLogprobs
from offline.sampling_params import SamplingParams

TEXT = Path(__file__).with_name("quality_text.txt")
MODES: dict[str, dict[str, object]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
}
REFERENCE = "float32"
AGREEMENT_TARGETS = {"bfloat16": 0.97}


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one mode: the likeliest token at each position of the text but the first, and the perplexity of the text."""

    likeliest: list[int]
    perplexity: float


def measure() -> Iterator[Row]:
    reference: Reading | None = None
    for mode, changes in MODES.items():
        reading = _read(changes)
        reference = reference or reading
        yield Row("perplexity of a fixed text", mode, reading.perplexity)
        if mode != REFERENCE:
            yield Row(
                "likeliest token is that of float32",
                mode,
                agreement(reading, reference),
                AGREEMENT_TARGETS.get(mode),
                "higher",
            )


def agreement(one: Reading, other: Reading) -> float:
    """Share of the positions where both expect the same token."""
    same = sum(a == b for a, b in zip(one.likeliest, other.likeliest, strict=True))
    return same / len(one.likeliest)


def reading_of(token_ids: list[int], positions: list[PositionLogprobs | None]) -> Reading:
    """From a prompt's log-probabilities, with at least the likeliest token besides the prompt's own."""
    # The first token is behind nothing.
    known = [(token, entries) for token, entries in zip(token_ids, positions, strict=True) if entries is not None]
    likeliest = [max(entries, key=lambda token: entries[token].logprob) for _, entries in known]
    mean = sum(entries[token].logprob for token, entries in known) / len(known)
    return Reading(likeliest, math.exp(-mean))


def _read(changes: dict[str, object]) -> Reading:
    settings = {**engine_flags.SETTINGS, "max_model_len": 4096, **changes}
    with LLM(**settings) as llm:  # type: ignore[arg-type]  # checked there
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        output = llm.generate(TEXT.read_text(encoding="utf-8"), params, use_tqdm=False)[0]
    if output.prompt_logprobs is None:
        raise ValueError(f"no log-probabilities: {output.error}")
    return reading_of(output.prompt_token_ids, output.prompt_logprobs)


if __name__ == "__main__":
    rows.main(measure)
