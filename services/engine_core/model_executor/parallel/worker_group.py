"""What the workers of one model say to each other while it runs: torch.distributed, gloo on CPUs and NCCL on GPUs.

Owner: the main thread of each worker. A peer that dies ends the call that waits for it with an error; what hangs is
ended by the watchdogs of the engine, so nothing here has a time limit of its own.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine_core.model_executor.parallel.place import Place
from stepwire.settings import set_default_variable

_NEVER = timedelta(days=7)


class WorkerGroup:
    """One worker's end of all connections. Built by all workers at the same time."""

    def __init__(self, place: Place, device: torch.device, rendezvous: Path) -> None:
        self.place = place
        self.device = device
        if sys.platform == "linux":
            # All workers are on this host, and its name need not resolve.
            set_default_variable("GLOO_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous.as_uri(),
            rank=place.rank,
            world_size=place.num_workers,
            timeout=_NEVER,
            device_id=device if device.type == "cuda" else None,
        )
        # Every worker has to make every group, in the same order.
        size = place.tensor_parallel_size
        stages = [
            dist.new_group(list(range(start, start + size)), timeout=_NEVER)
            for start in range(0, place.num_workers, size)
        ]
        self._stage = stages[place.stage]
        # Tokens travel beside the model's own traffic, whose order differs between the stages.
        self._tokens = dist.new_group(backend="gloo", timeout=_NEVER)
        self._sending: tuple[dist.Work, torch.Tensor] | None = None

    def sum_over_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same sum for all shards of the stage, in place."""
        dist.all_reduce(tensor, group=self._stage)
        return tensor

    def send_to_next_stage(self, tensor: torch.Tensor) -> None:
        """Returns before it has arrived, so that this stage can begin with the next batch."""
        if self._sending is not None:
            self._sending[0].wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.place.rank + self.place.tensor_parallel_size)
        if work is not None:
            # The tensor has to live until it is sent.
            self._sending = (work, tensor)

    def receive_from_previous_stage(self, buffer: torch.Tensor) -> None:
        dist.recv(buffer, self.place.rank - self.place.tensor_parallel_size)

    def start_token_broadcast(self, token_ids: torch.Tensor) -> dist.Work:
        """token_ids int64 [S] of the leader go to all others; theirs is overwritten when the work is done."""
        work: dist.Work = dist.broadcast(token_ids, self.place.leader, group=self._tokens, async_op=True)
        return work

    def wait_for_all(self) -> None:
        dist.barrier(group=self._tokens)

    def close(self) -> None:
        dist.destroy_process_group()
