"""The library's compilers: one for the vocabulary, and some for it with special tokens that a structural tag may write.

Special tokens have no text in the vocabulary, so no grammar lets them pass. Families of models begin their calls with
one: a structural tag names those in `special_tokens`, beside `format`, and to its grammar they are the text they spell.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import xgrammar

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.structured_output.vocabulary import Vocabulary

# Each holds the vocabulary once more, sorted. A deployment has one family of models.
MAX_SPELLING = 4


class Backends:
    """Thread-safe. The library's own cache is off: a look-up there would queue behind the compiles of others."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._plain = _new_backend(vocabulary.tokens)
        self._lock = threading.Lock()
        self._spelling: OrderedDict[frozenset[str], xgrammar.GrammarCompiler] = OrderedDict()

    def backend_for(self, spec: GrammarSpec) -> xgrammar.GrammarCompiler:
        """What compiles this constraint; the first with its special tokens takes as long as a large vocabulary does."""
        named = frozenset(name for name in named_special_tokens(spec) if name in self._vocabulary.special_token_ids)
        if not named:
            return self._plain
        with self._lock:
            backend = self._spelling.pop(named, None)
            if backend is None:
                backend = _new_backend(self._vocabulary.spelling(named).tokens)
            self._spelling[named] = backend
            if len(self._spelling) > MAX_SPELLING:
                self._spelling.popitem(last=False)
            return backend


def named_special_tokens(spec: GrammarSpec) -> frozenset[str]:
    """Those that the text may hold, by what they spell; none where the constraint is no structural tag, or broken."""
    if spec.kind != "structural_tag":
        return frozenset()
    try:
        tag: Any = json.loads(spec.text)
    except (ValueError, RecursionError):
        return frozenset()
    named = tag.get("special_tokens") if isinstance(tag, dict) else None
    return frozenset(name for name in named if isinstance(name, str)) if isinstance(named, list) else frozenset()


def _new_backend(tokens: tuple[bytes, ...]) -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(list(tokens), xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
