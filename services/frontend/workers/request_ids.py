"""Which worker has which request: an id is in flight for its caller once, wherever it comes to. Event loop only."""

from __future__ import annotations

# The namespace of the caller, and the id.
RequestKey = tuple[str, str]


class RequestIds:
    """Kept by the supervisor, because between two workers neither could decide."""

    def __init__(self) -> None:
        self._owners: dict[RequestKey, int] = {}

    def claim(self, worker: int, key: RequestKey) -> int:
        """The worker that has the request now: this one, or another that had it already."""
        return self._owners.setdefault(key, worker)

    def release(self, worker: int, key: RequestKey) -> None:
        """It has ended. Nothing happens when it is another worker's: then this one's was refused."""
        if self._owners.get(key) == worker:
            del self._owners[key]

    def forget(self, worker: int) -> None:
        """The process is gone, and its requests with it."""
        self._owners = {key: owner for key, owner in self._owners.items() if owner != worker}

    def by_owner(self, caller: str, request_ids: list[str], asker: int) -> dict[int, list[str]]:
        """Those that other workers than the asker have."""
        found: dict[int, list[str]] = {}
        for request_id in request_ids:
            owner = self._owners.get((caller, request_id), asker)
            if owner != asker:
                found.setdefault(owner, []).append(request_id)
        return found
