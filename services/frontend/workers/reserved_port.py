"""A port that several workers are to share: taken so that no other program gets it, and never listened on here.

Workers listen with SO_REUSEPORT, under which a second server of the same user would silently get a part of the
connections. So the supervisor first binds alone, which fails when anybody is there, and then holds the port as one of
those who share it.
"""

from __future__ import annotations

import socket

from stepwire.listen_address import bind_error


class ReservedPort:
    """Held until `close`."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 = any free one. Raises BindError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._holder = socket.socket(family, socket.SOCK_STREAM)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as alone:
                # Connections of a former server that are not forgotten yet do not matter.
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((host, port))
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._holder.bind((host, port))
        except OSError:
            self._holder.close()
            raise bind_error(host, port) from None
        self.port: int = self._holder.getsockname()[1]

    def close(self) -> None:
        self._holder.close()
