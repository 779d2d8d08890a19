"""Where one worker stands among all of them: numbers only, no torch, no sockets.

Ranks count the stages of the pipeline one after the other; the shards of one stage are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's share of the model."""

    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shard(self) -> int:
        """Which part of each layer of its stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Which part of the layers."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def leader(self) -> int:
        """The one rank that samples; the others are told its tokens."""
        return self.num_workers - self.tensor_parallel_size

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    def layers(self, num_layers: int) -> range:
        """The layers of its stage. The first stages take what is left over: the last one has the output matrix."""
        share, rest = divmod(num_layers, self.pipeline_parallel_size)
        start = self.stage * share + min(self.stage, rest)
        return range(start, start + share + (self.stage < rest))
