"""A port of this host that leads to another one, as `kubectl port-forward` has it. Ends with its process."""

from __future__ import annotations

import socket
import sys
import threading


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        sink.close()


def serve(port: int, target: str) -> None:
    """Says where it listens, in kubectl's words, and never returns. `port` 0 is any that is free."""
    host, _, number = target.rpartition(":")
    with socket.create_server(("127.0.0.1", port)) as server:
        sys.stdout.write(f"Forwarding from 127.0.0.1:{server.getsockname()[1]} -> {number}\n")
        sys.stdout.flush()
        while True:
            near, _ = server.accept()
            far = socket.create_connection((host, int(number)))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=pair, daemon=True).start()
