"""Ports that the system hands to nobody else."""

from __future__ import annotations

import os
import random
import socket

# Below the range from which the system serves outgoing connections and `port 0`: a port from there could be taken
# between two starts of a service that must keep its address.
_FIRST, _END = 10_240, 32_768
# Each process of a run in parallel has ports of its own: one that was handed out is nobody's until a service listens.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_SHARE = (_END - _FIRST) // _NUM_WORKERS
_OWN = range(_FIRST + _WORKER * _SHARE, _FIRST + (_WORKER + 1) * _SHARE)
_CANDIDATES = random.SystemRandom().sample(_OWN, k=min(4096, _SHARE))
_handed_out: set[int] = set()


def free_port(*beside: int) -> int:
    """A TCP port of 127.0.0.1 where nobody listens, nor at these distances above it; each call gives another one."""
    while True:
        port = _CANDIDATES.pop()
        ports = {port, *(port + distance for distance in beside)}
        if _handed_out.isdisjoint(ports) and all(map(_is_free, ports)):
            _handed_out.update(ports)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
