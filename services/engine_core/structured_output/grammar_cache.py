"""Compiled grammars by what they were compiled from, least recently used first out, bounded by their bytes.

Not thread-safe: the compiler holds its lock around every call.
"""

from __future__ import annotations

from collections import OrderedDict

import xgrammar

from engine_core.scheduler.grammar import GrammarSpec

# What a grammar was compiled from: the constraint, and the SHA-256 of the vocabulary.
CacheKey = tuple[GrammarSpec, str]


class GrammarCache:
    """A grammar larger than the bound is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[CacheKey, tuple[xgrammar.CompiledGrammar, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._grammars)

    def get(self, key: CacheKey) -> xgrammar.CompiledGrammar | None:
        if key not in self._grammars:
            return None
        self._grammars.move_to_end(key)
        return self._grammars[key][0]

    def put(self, key: CacheKey, grammar: xgrammar.CompiledGrammar) -> None:
        if key in self._grammars:
            return
        num_bytes = grammar.memory_size_bytes + len(key[0].text)
        self._grammars[key] = (grammar, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, (_, num_freed) = self._grammars.popitem(last=False)
            self.num_bytes -= num_freed
