"""Who is compared with whom, at what, and with which target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from bench.peers import contestants, places
from bench.peers.contestants import Contestant
from bench.peers.tasks import NUM_SHARING, Task
from bench.rows import Better

STEPWIRE, OFFLINE, VLLM, VLLM_SERVER, LLAMA = "stepwire", "stepwire offline", "vLLM offline", "vLLM server", "llama.cpp"


@dataclass(frozen=True, slots=True)
class Match:
    """`mine` over `peer` in one figure of one task, whose kind gets the number of the round."""

    mine: str
    peer: str
    title: str
    case: str
    task: Task
    target: float | None
    metric: str = "tok_s"
    better: Better = "higher"
    repetition: int = 0

    def in_round(self, number: int) -> Task:
        """Prompts that no earlier round has sent, so that no prefix cache hits but in repetitions."""
        return replace(self.task, kind=f"{self.task.kind}-{number}")


@dataclass(frozen=True, slots=True)
class Session:
    """Contestants that are up at the same time, and what they are measured at, in turn."""

    contestants: dict[str, Callable[[], AbstractContextManager[Contestant]]]
    matches: list[Match]

    def tiny(self) -> Session:
        """The same with a few tokens, to see that everything is installed. Its figures mean nothing."""
        first = {(match.mine, match.title, match.repetition): match for match in reversed(self.matches)}
        tiny = [
            replace(match, case=f"tiny, {match.case}", task=replace(match.task, count=1, max_tokens=2), target=None)
            for match in first.values()
        ]
        return Session(self.contestants, tiny)


def sessions() -> dict[str, Session]:
    """By name, in the order of their run."""
    model = places.model_dir
    service = contestants.stepwire_service
    return {
        "vllm-offline": Session(
            {STEPWIRE: service, VLLM: lambda: contestants.vllm_offline(model(), "bfloat16")},
            [*_w1(VLLM, {1: 1.4, 8: 1.35, 32: 1.3, 64: 1.3}), _w2(), *_w3()],
        ),
        "vllm-server": Session(
            {STEPWIRE: service, VLLM_SERVER: lambda: contestants.vllm_server(model(), "bfloat16")},
            _w1(VLLM_SERVER, dict.fromkeys((1, 8, 32, 64), 1.5)),
        ),
        "llama": Session({STEPWIRE: service, LLAMA: contestants.llama_batched}, _w1(LLAMA, {1: 1.0, 8: 1.6, 32: 2.0})),
        "fp32": Session(
            {
                STEPWIRE: partial(service, dtype="float32"),
                VLLM: lambda: contestants.vllm_offline(model(), "float32"),
            },
            _w1(VLLM, dict.fromkeys((1, 8, 32), 1.5), "W1 fp32"),
        ),
        "one-layer": _one_layer(),
    }


def _w1(peer: str, targets: dict[int, float], title: str = "W1", mine: str = STEPWIRE) -> list[Match]:
    matches, first = [], 0
    for count, target in targets.items():
        matches.append(Match(mine, peer, title, f"c={count}", Task("short", first, count, 128), target))
        # Other prompts than those of the other concurrencies.
        first += count
    return matches


def _w2() -> Match:
    task = Task("long", 0, 1, 16)
    return Match(STEPWIRE, VLLM, "W2", "1024 in", task, 0.8, metric="ttft_mean", better="lower")


def _w3() -> list[Match]:
    task = Task("prefix", 0, NUM_SHARING, 32, repetitions=2)
    first = Match(STEPWIRE, VLLM, "W3", "first", task, 0.7, metric="wall_s", better="lower")
    return [first, replace(first, case="repeated", repetition=1)]


def _one_layer() -> Session:
    from bench import one_layer_model

    most = 256
    changes: dict[str, object] = {"model": str(one_layer_model.DIRECTORY), "max_num_seqs": most}

    def vllm() -> AbstractContextManager[Contestant]:
        return contestants.vllm_offline(one_layer_model.make(), "bfloat16", most)

    def stepwire(
        start: Callable[..., AbstractContextManager[Contestant]],
    ) -> Callable[[], AbstractContextManager[Contestant]]:
        def begin() -> AbstractContextManager[Contestant]:
            one_layer_model.make()
            return start(**changes)

        return begin

    title = "one-layer model"
    return Session(
        {
            STEPWIRE: stepwire(contestants.stepwire_service),
            OFFLINE: stepwire(contestants.stepwire_offline),
            VLLM: vllm,
        },
        [
            *_w1(VLLM, {64: 1.3, most: 1.3}, title),
            *_w1(VLLM, {64: 1.6, most: 1.6}, title, OFFLINE),
        ],
    )
