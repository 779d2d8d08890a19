"""The settings of each worker, from those of the whole frontend. Pure."""

from __future__ import annotations

import socket

from frontend.config import FrontendSettings


def settings_of(worker: int, settings: FrontendSettings) -> FrontendSettings:
    """Its part of the limits, so that all together never pass what the operator has set, and a name of its own."""
    return settings.model_copy(
        update={
            "max_concurrent_requests": part_of(settings.max_concurrent_requests, worker, settings.workers),
            "max_concurrent_prompt_tokens": part_of(settings.max_concurrent_prompt_tokens, worker, settings.workers),
            "client_id": f"{settings.client_id or socket.gethostname()}-{worker}",
        }
    )


def part_of(limit: int, worker: int, num_workers: int) -> int:
    """Parts differ by one at most, and their sum is the limit."""
    return limit // num_workers + (worker < limit % num_workers)
