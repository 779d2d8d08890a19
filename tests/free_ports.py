"""Ports that the system hands to nobody else."""

from __future__ import annotations

import random
import socket

# Below the range from which the system serves outgoing connections and `port 0`: a port from there could be taken
# between two starts of a service that must keep its address.
_CANDIDATES = random.SystemRandom().sample(range(10_240, 32_768), k=4096)


def free_port() -> int:
    """A TCP port of 127.0.0.1 where nobody listens; each call gives another one."""
    while True:
        port = _CANDIDATES.pop()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
