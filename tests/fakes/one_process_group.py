"""Stands in for a WorkerGroup in the process of a test: what one worker sends, the test looks at or hands on."""

from __future__ import annotations

import torch

from engine_core.model_executor.parallel.place import Place


class FakeWork:
    """A broadcast that is done when the test says so."""

    def __init__(self, token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids
        self.told: list[int] | None = None
        self.was_waited_for = False

    def wait(self) -> None:
        assert self.told is not None, "waited for tokens that nobody has sampled yet"
        self.token_ids[:] = torch.tensor(self.told)
        self.was_waited_for = True


class OneProcessGroup:
    """One worker's end; `wire` connects the stages of a pipeline that the test runs one after the other."""

    def __init__(self, place: Place, wire: list[torch.Tensor] | None = None) -> None:
        self.place = place
        self.device = torch.device("cpu")
        self.wire = [] if wire is None else wire
        self.broadcasts: list[FakeWork] = []

    def sum_over_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send_to_next_stage(self, tensor: torch.Tensor) -> None:
        self.wire.append(tensor.clone())

    def receive_from_previous_stage(self, buffer: torch.Tensor) -> None:
        buffer.copy_(self.wire.pop(0))

    def start_token_broadcast(self, token_ids: torch.Tensor) -> FakeWork:
        self.broadcasts.append(FakeWork(token_ids))
        return self.broadcasts[-1]

    def wait_for_all(self) -> None:
        pass
