"""The model behind the engines as the frontend serves it: tokenizer, both processors, and the facts of the engines.

Owner: the event loop (offline: the caller's thread). Exists from the first engine on, and is replaced only when engines
come back with another model.
The pool lets none in while an engine with this one takes requests or still runs some; what is then still being
tokenized is refused when it is submitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from frontend.abort_kind import AbortKind
from frontend.chat.model import ChatModel, ChatOptions
from frontend.engine_client.engine_facts import EngineFacts
from frontend.input_processor import InputProcessor, ModelFacts
from frontend.output_processor import OutputProcessor
from frontend.processing_failures import Stage
from frontend.text_times import TextTimes
from frontend.tokenizer import Tokenizer
from stepwire import tokenizer_archive


class ServingModel:
    """Built by `load`; `update` takes the facts of engines that come and go."""

    def __init__(
        self,
        facts: EngineFacts,
        tokenizer: Tokenizer,
        on_abort: Callable[[list[int], AbortKind], None],
        on_failure: Callable[[Stage], None],
        tokenizer_threads: int,
        chat: ChatModel,
        tokenizer_archive: bytes,
        times: TextTimes | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        # The tokenizer's files as GetTokenizer gives them.
        self.tokenizer_archive = tokenizer_archive
        # Another model has taken its place: what was prepared here must not reach an engine.
        self.is_retired = False
        self.input_processor = InputProcessor(
            tokenizer, _model_facts(facts), num_threads=tokenizer_threads, times=times
        )
        self.output_processor = OutputProcessor(tokenizer, on_abort, on_failure, times=times)
        self.update(facts)

    @classmethod
    async def load(
        cls,
        facts: EngineFacts,
        tokenizer_dir: Path,
        on_abort: Callable[[list[int], AbortKind], None],
        on_failure: Callable[[Stage], None],
        tokenizer_threads: int,
        chat_options: ChatOptions,
        times: TextTimes | None = None,
    ) -> ServingModel:
        """Read the tokenizer in a thread: it takes a good part of a second. Raises ValueError for unusable files."""
        tokenizer = await asyncio.to_thread(Tokenizer.from_directory, tokenizer_dir)
        chat = await asyncio.to_thread(ChatModel.from_directory, tokenizer_dir, chat_options)
        archive = await asyncio.to_thread(tokenizer_archive.build, tokenizer_dir)
        return cls(facts, tokenizer, on_abort, on_failure, tokenizer_threads, chat, archive, times)

    def update(self, facts: EngineFacts) -> None:
        """Serve with these facts from now on; requests being processed keep the old ones."""
        self.facts = facts
        self.input_processor.facts = _model_facts(facts)

    def is_same(self, facts: EngineFacts) -> bool:
        """Whether requests prepared here may run on an engine with these facts."""
        return self.facts.text_identity == facts.text_identity

    def close(self) -> None:
        """Retire, and let go of the threads."""
        self.is_retired = True
        self.input_processor.close()


def _model_facts(facts: EngineFacts) -> ModelFacts:
    return ModelFacts(
        served_model_name=facts.model,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        kv_cache_tokens=facts.kv_cache_tokens,
        max_logprobs=facts.max_logprobs,
        structured_output_kinds=facts.structured_output_kinds,
        has_priorities=facts.has_priorities,
        embedding_dimensions=facts.embedding_dimensions,
    )
