"""A steady load of resuming streams, for tests that restart servers under it; every answer is kept, token by token.

Needs the client alone, so that a pod of a cluster can run it: `python rollout_load.py --target dns:///name:50051`. Each
answer is then a line of JSON on stdout. Belongs to one event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field

import grpc

from stepwire.v1.generation_service_pb2 import GenerateRequest
from stepwire_client import AsyncClient, CallError
from stepwire_client.call_facts import CallFacts

MAX_RESUMES = 20
MAX_REPEATS = 20
REPEAT_DELAY_S = 0.1
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """How one stream ended. `error` is empty for one that ended well; `number` says which request it was."""

    number: int
    token_ids: tuple[int, ...]
    # Calls after the first: those that went on behind the tokens so far, and those before which nothing was accepted.
    num_resumes: int
    num_repeats: int
    error: str = ""


@dataclass(slots=True)
class _CountedCalls(CallFacts):
    num_calls: int = field(default=0)

    def note(self, headers: Iterable[object] | None, trailers: Iterable[object] | None) -> None:
        self.num_calls += 1


class Load:
    """`concurrency` streams at a time: at least `num_streams` of them, and more until `stop`."""

    def __init__(
        self, client: AsyncClient, request_of: Callable[[int], GenerateRequest], num_streams: int, concurrency: int = 8
    ) -> None:
        """`request_of(number)` must always be the same for a number; behind `num_streams` they start again at 0."""
        self.answers: list[Answer] = []
        self._client, self._request_of, self._num_streams = client, request_of, num_streams
        self._num_begun = 0
        self._is_over = False
        self._workers = [asyncio.create_task(self._work()) for _ in range(concurrency)]

    async def stop(self) -> list[Answer]:
        """All answers, once enough have come and no stream is left."""
        self._is_over = True
        await asyncio.gather(*self._workers)
        return self.answers

    async def _work(self) -> None:
        while self._num_begun < self._num_streams or not self._is_over:
            number = self._num_begun % self._num_streams
            self._num_begun += 1
            self.answers.append(await self._answer(number))

    async def _answer(self, number: int) -> Answer:
        token_ids: list[int] = []
        facts = _CountedCalls()
        for num_repeats in range(MAX_REPEATS + 1):
            facts.num_calls = 0
            try:
                await self._read(number, token_ids, facts)
            except CallError as error:
                # Nothing was accepted, so nothing can run twice: to ask again is right, and the caller's to do.
                may_repeat = error.code is grpc.StatusCode.UNAVAILABLE and not token_ids
                if not may_repeat or num_repeats == MAX_REPEATS:
                    return Answer(number, tuple(token_ids), max(0, facts.num_calls - 1), num_repeats, str(error))
                await asyncio.sleep(error.details.retry_after_s or REPEAT_DELAY_S)
            else:
                return Answer(number, tuple(token_ids), facts.num_calls - 1, num_repeats)
        raise AssertionError("the last try returns")

    async def _read(self, number: int, token_ids: list[int], facts: CallFacts) -> None:
        request = self._request_of(number)
        request.output.token_ids = True
        stream = self._client.generate_stream(request, timeout_s=TIMEOUT_S, max_resumes=MAX_RESUMES, facts=facts)
        async with aclosing(stream) as events:
            async for event in events:
                token_ids += event.delta.token_ids


def differences(answers: Iterable[Answer], undisturbed: Iterable[Answer]) -> list[str]:
    """What a disturbed run shows that the other does not: failures and other tokens, one sentence each."""
    expected = {answer.number: answer.token_ids for answer in undisturbed if not answer.error}
    findings = []
    for answer in answers:
        if answer.error:
            findings.append(f"stream {answer.number} failed after {len(answer.token_ids)} tokens: {answer.error}")
        elif answer.token_ids != expected.get(answer.number):
            findings.append(f"stream {answer.number} has other tokens than the undisturbed run")
    return findings


def parse_answers(lines: Iterable[str]) -> list[Answer]:
    """What `main` has printed. Raises ValueError for a line that is none of its own."""
    answers = []
    for line in filter(None, map(str.strip, lines)):
        fields = json.loads(line)
        answers.append(Answer(**{**fields, "token_ids": tuple(fields["token_ids"])}))
    return answers


def text_request(number: int, max_tokens: int) -> GenerateRequest:
    """A sampled request to a model with a tokenizer, of a seed and a length of its own."""
    request = GenerateRequest(text=f"Story number {number}: once upon a time" + " there was" * (number % 3))
    request.sampling.temperature, request.sampling.seed = 0.8, number + 1
    request.stop.max_tokens, request.stop.ignore_eos = max_tokens // 2 + number % (max_tokens // 2 + 1), True
    return request


async def run(options: argparse.Namespace, wait_for_stop: Callable[[], Awaitable[object]]) -> list[Answer]:
    """The load of the command line, until `wait_for_stop` returns."""
    async with AsyncClient(options.target, is_balanced=True) as client:
        load = Load(
            client, lambda number: text_request(number, options.max_tokens), options.streams, options.concurrency
        )
        await wait_for_stop()
        return await load.stop()


def main() -> None:
    """Runs until stdin ends, and then prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args()
    answers = asyncio.run(run(options, lambda: asyncio.to_thread(sys.stdin.read)))
    for answer in answers:
        sys.stdout.write(json.dumps(asdict(answer)) + "\n")


if __name__ == "__main__":
    main()
