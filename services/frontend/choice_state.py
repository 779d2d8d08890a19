"""One choice on its way to the caller: engine tokens in; text, ids and the end of the choice out.

Pure: no I/O, no clock. Owned by the output processor, one for each handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.content_search import ContentSearch
from frontend.detokenizer import Detokenizer
from frontend.engine_outputs import EngineFinish, EngineFinishReason, EngineOutput
from frontend.generation_events import FinishReason, StopMatch
from frontend.input_processor.processed_request import ProcessedRequest
from frontend.logprobs import HeldLogprobs
from frontend.output_parsers.reasoning import ReasoningParser
from frontend.stop_strings import HeldTokens, StopHit, StopMatcher
from frontend.tokenizer import Tokenizer
from stepwire.packed_logprobs import PackedLogprobs

# Resumed tokens are replayed only as far back as an unfinished character and a stop string can reach, and some more
# because tokens may have no text.
_REPLAY_MARGIN = 64

_REASONS = {
    EngineFinishReason.STOP: FinishReason.STOP,
    EngineFinishReason.LENGTH: FinishReason.LENGTH,
    EngineFinishReason.REPETITION: FinishReason.REPETITION,
    # Only ends that the caller asked for get here; the processor turns others into errors.
    EngineFinishReason.ABORTED: FinishReason.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class ChoiceNews:
    """What one engine output means for the caller. `num_billed` counts tokens that were generated and not dropped."""

    text: str
    token_ids: list[int]
    # Output tokens behind text and ids.
    num_tokens: int
    num_billed: int
    reason: FinishReason | None = None
    stop_match: StopMatch | None = None
    # One row for each of the `num_tokens` tokens.
    logprobs: PackedLogprobs | None = None


class ChoiceState:
    """Detokenizer, stop strings and counters of one choice.

    With a `sibling` that has had no output the decoder is copied: priming a thousand would hold up the event loop.
    With a `reasoning` parser, this choice's own, stop strings are looked for in the content that it leaves.
    """

    def __init__(
        self,
        request: ProcessedRequest,
        choice: int,
        tokenizer: Tokenizer,
        sibling: ChoiceState | None = None,
        reasoning: ReasoningParser | None = None,
    ) -> None:
        self.choice = choice
        self._output = request.output
        self._min_tokens = request.min_tokens
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self._search: ContentSearch | None = None
        if request.stop_strings:
            matcher = StopMatcher(request.stop_strings, include_stop=request.include_stop)
            self._search = ContentSearch(matcher, reasoning)
        self._held = HeldTokens(self._search.num_held_chars if self._search else 0)
        self._logprobs = HeldLogprobs(request.output.logprobs_width) if request.output.has_logprobs else None
        self._include_stop = request.include_stop
        self._num_resumed = len(request.resume_output_token_ids)
        # The echo opens the first delta; a resumed stream has had it.
        self._echo_text = request.prompt_text if not self._num_resumed else None
        self._prompt_token_ids = request.prompt_token_ids
        # Tokens of the whole output, resumed ones included.
        self._num_tokens = 0
        if sibling is not None and sibling._detokenizer is not None:
            self._detokenizer: Detokenizer | None = sibling._detokenizer.copy()
        else:
            self._detokenizer = self._prime(request, tokenizer) if request.output.text else None
        self._num_tokens = self._num_resumed
        # No text is searched or held back, and nothing comes with a token.
        self._can_be_plain = self._search is None and self._logprobs is None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated for this call."""
        return self._num_tokens - self._num_resumed

    def take_plain(self, token_id: int) -> str:
        """Take a token whose text is known and goes out at once; empty, and nothing has changed, for any other."""
        if (
            self._detokenizer is None
            or not self._can_be_plain
            or self._echo_text is not None
            or not self._held.is_empty
        ):
            return ""
        piece = self._detokenizer.step_plain(token_id)
        if piece:
            self._num_tokens += 1
        return piece

    @property
    def shows_token_ids(self) -> bool:
        return self._output.token_ids

    def process(self, output: EngineOutput) -> ChoiceNews:
        """Take the news of one step. Must not be called again once it returned a reason."""
        num_before = self._num_tokens
        if self._logprobs is not None:
            self._logprobs.append(output.logprobs, len(output.new_token_ids))
        finish = output.finish
        visible, num_hidden = self._split_stop_token(output.new_token_ids, finish)
        hit = self._feed_all(visible)
        if hit is None:
            self._num_tokens += num_hidden
            if finish is not None:
                hit = self._flush()
        return self._news(hit, output, self._num_tokens - num_before)

    def _prime(self, request: ProcessedRequest, tokenizer: Tokenizer) -> Detokenizer:
        """A decoder that stands where the output begins, or where the resumed output ends."""
        resumed = request.resume_output_token_ids
        reach = _REPLAY_MARGIN + max((len(stop) for stop in request.stop_strings), default=0)
        skipped, replayed = resumed[:-reach], resumed[-reach:]
        prompt = [*request.prompt_token_ids[-_REPLAY_MARGIN:], *skipped[-_REPLAY_MARGIN:]]
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=request.output.skip_special_tokens)
        self._num_tokens = len(skipped)
        if self._search is not None and self._search.has_reasoning:
            # Whether the answer is still inside its reasoning is told by all of it; decoded at once that is quick.
            skips = request.output.skip_special_tokens
            self._search.feed(tokenizer.decode(skipped, skip_special_tokens=skips), is_searched=False)
        for token_id in replayed:
            self._num_tokens += 1
            # Its text was delivered before; only the matcher has to know it, for a stop that goes on.
            self._match(detokenizer.step(token_id))
        return detokenizer

    def _split_stop_token(self, token_ids: Sequence[int], finish: EngineFinish | None) -> tuple[Sequence[int], int]:
        """Tokens to show, and the number of those to hide: the stop token, which the engine sends last."""
        if finish is None or finish.reason is not EngineFinishReason.STOP or self._include_stop or not token_ids:
            return token_ids, 0
        # A grammar may also end with a token of the text: without an end of sequence nothing follows to end it.
        is_stop_token = finish.stop_token_id is not None or token_ids[-1] in self._eos_token_ids
        return (token_ids[:-1], 1) if is_stop_token else (token_ids, 0)

    def _feed_all(self, token_ids: Sequence[int]) -> StopHit | None:
        """Take tokens up to the first stop string; what follows it is dropped and not counted."""
        for token_id in token_ids:
            self._num_tokens += 1
            if self._detokenizer is None:
                self._held.append(token_id, "", is_unfinished=False)
                continue
            piece = self._detokenizer.step(token_id)
            self._held.append(token_id, piece, is_unfinished=self._detokenizer.has_unfinished)
            hit = self._match(piece)
            if hit is not None:
                return hit
        return None

    def _match(self, piece: str) -> StopHit | None:
        if self._search is None or not piece:
            return None
        # Text of the first min_tokens tokens is neither searched now nor kept for later.
        return self._search.feed(piece, is_searched=self._num_tokens > self._min_tokens)

    def _flush(self) -> StopHit | None:
        piece = self._detokenizer.flush() if self._detokenizer else ""
        hit = None
        if piece:
            self._held.append_rest(piece)
            hit = self._match(piece)
        return self._search.finish() if hit is None and self._search is not None else hit

    def _news(self, hit: StopHit | None, output: EngineOutput, num_billed: int) -> ChoiceNews:
        reason: FinishReason | None = None
        stop_match: StopMatch | None = None
        if hit is not None:
            self._held.cut(hit.num_excess_chars)
            reason, stop_match = FinishReason.STOP, StopMatch(stop_string=hit.stop)
        elif output.finish is not None:
            reason, stop_match = _REASONS[output.finish.reason], self._token_match(output)
        if reason is not None:
            text, token_ids = self._held.drain()
        elif self._search is not None and self._search.is_undecided:
            text, token_ids = "", []
        else:
            text, token_ids = self._held.release()
        num_tokens = len(token_ids)
        # Hidden and dropped tokens are the last ones: what is shown is always the beginning of what is held.
        logprobs = self._logprobs.take(num_tokens) if self._logprobs is not None else None
        if not self._output.token_ids:
            token_ids = []
        if self._echo_text is not None and (text or token_ids or reason):
            text, token_ids = self._with_echo(text, token_ids)
        return ChoiceNews(text, token_ids, num_tokens, num_billed, reason, stop_match, logprobs)

    def _token_match(self, output: EngineOutput) -> StopMatch | None:
        finish, token_ids = output.finish, output.new_token_ids
        if finish is None or finish.reason is not EngineFinishReason.STOP:
            return None
        if finish.stop_token_id is not None:
            return StopMatch(stop_token_id=finish.stop_token_id)
        if token_ids and token_ids[-1] in self._eos_token_ids:
            return StopMatch(eos_token_id=token_ids[-1])
        return None

    def _with_echo(self, text: str, token_ids: list[int]) -> tuple[str, list[int]]:
        echo_text, self._echo_text = self._echo_text or "", None
        if self._output.text:
            text = echo_text + text
        if self._output.token_ids:
            token_ids = [*self._prompt_token_ids, *token_ids]
        return text, token_ids
