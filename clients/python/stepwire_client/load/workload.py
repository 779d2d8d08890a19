"""What is sent: prompts as token ids and answer lengths, drawn from a seed or read from a file. Pure but for the file.

Two servers that get the same options get the same requests.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# The lowest ids are the special tokens of most vocabularies.
_FIRST_TOKEN_ID = 10
MIN_VOCAB_SIZE = _FIRST_TOKEN_ID + 1


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One prompt and how long its answer may get."""

    prompt_token_ids: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A fixed length, or all lengths of a range alike."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`64` or `16:1500`. Raises ValueError."""
        low, separator, high = text.partition(":")
        lengths = cls(int(low), int(high) if separator else int(low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text!r} is neither a length nor a range low:high from 1 on")
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def synthetic(
    input_lengths: Lengths, output_lengths: Lengths, shared_prefix_len: int, vocab_size: int, seed: str
) -> Iterator[LoadRequest]:
    """Endless random prompts, each of its own but for the shared prefix, which counts in the input length.

    `vocab_size` from MIN_VOCAB_SIZE on.
    """
    rng = random.Random(seed)
    token_ids = range(_FIRST_TOKEN_ID, vocab_size)
    shared = rng.choices(token_ids, k=shared_prefix_len)
    while True:
        num_own = input_lengths.draw(rng) - shared_prefix_len
        yield LoadRequest([*shared, *rng.choices(token_ids, k=num_own)], output_lengths.draw(rng))


def from_prompts(
    prompts: Sequence[Sequence[int]], output_lengths: Lengths, first: int, seed: str
) -> Iterator[LoadRequest]:
    """Endless requests from given prompts in order, from prompt `first` on and round at the end."""
    rng = random.Random(seed)
    for index in itertools.count(first):
        yield LoadRequest(prompts[index % len(prompts)], output_lengths.draw(rng))


def read_prompts(path: Path, kind: str) -> list[list[int]]:
    """Prompts of one kind from a JSON object: lists of token ids, or a `shared` beginning with the `own` ends.

    Raises ValueError in words for the user.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not content.get(kind):
        raise ValueError(f"{path} is no JSON object with prompts of kind {kind!r}")
    prompts = content[kind]
    try:
        if isinstance(prompts, dict):
            prompts = [prompts["shared"] + own for own in prompts["own"]]
        token_ids = [[int(token_id) for token_id in prompt] for prompt in prompts]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: {kind!r} is neither lists of token ids nor a `shared` list with `own` ones"
        ) from error
    if not token_ids or not all(token_ids):
        raise ValueError(f"{path}: {kind!r} holds no prompt, or an empty one")
    return token_ids
