"""What must be true before anything is started: the ports are free and the memory suffices."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil

from launcher.errors import LaunchError

HOST = "127.0.0.1"
GIB = 1024**3
# fp32 weights of the embedded model, the smallest useful KV cache, and two Python processes. A larger model is
# measured by the engine itself, which knows its size.
NEEDED_BYTES = int(1.5 * GIB)


def check_ports(ports: Iterable[tuple[str, int]]) -> None:
    """Every port can be bound. With each comes the flag that moves it."""
    for flag, port in ports:
        if not is_free(port):
            raise LaunchError(
                f"port {port} of {HOST} is in use: stop what listens there, or choose another one with --{flag}"
            )


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do it: connections of a server that has just ended do not hold its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def check_memory(needed_bytes: int = NEEDED_BYTES) -> None:
    """Enough memory is available for the smallest model."""
    available = psutil.virtual_memory().available
    if available < needed_bytes:
        raise LaunchError(
            f"too little memory: {needed_bytes / GIB:.1f} GiB are needed, {available / GIB:.1f} GiB are available"
        )
