"""What one process serves of a frontend: everything, or as one of several workers its part. No state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """The first worker has the admin port, the supervisor has the metrics port."""

    number: int = 0
    is_worker: bool = False
    # In place of a worker that has died: it listens when an engine is there, so that no caller meets it without.
    is_replacement: bool = False

    @property
    def has_admin_port(self) -> bool:
        return self.number == 0


SINGLE = Role()
