"""What a server says beside its answer: metadata before it and after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, str | bytes]


@dataclass(slots=True)
class CallFacts:
    """Given to a call, which fills it; of a stream that was resumed it holds what the last call was told.

    Headers name the request and its engine (`x-request-id`, `x-engine-id`). Trailers come with the end of the call,
    also of one that failed: among them the load report for those who ask for it (`endpoint-load-metrics`).
    """

    headers: Values = field(default_factory=dict)
    trailers: Values = field(default_factory=dict)
    # How often the answer broke off and went on.
    num_resumes: int = 0

    def note(self, headers: Iterable[Any] | None, trailers: Iterable[Any] | None) -> None:
        """Called at the end of a call."""
        self.headers = dict(headers or ())
        self.trailers = dict(trailers or ())
