"""Addresses that servers listen on: as text, as others know them, and why one was not to be had."""

from __future__ import annotations

import errno
import os
import socket


class BindError(Exception):
    """A listening address is not to be had; the message is complete as it is."""


def bind_error(host: str, port: int) -> BindError:
    """The error for an address whose bind has just failed; asks the kernel once more, because gRPC hides the cause."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except OSError as error:
        return BindError(f"cannot listen on {join(host, port)}: {_reason(error)}")
    return BindError(f"cannot listen on {join(host, port)}: the port was in use a moment ago; try again")


def join(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def known_as(host: str) -> str:
    """What others know a server by that listens there: the host's name when it listens on every interface."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "port in use by another process"
    if error.errno == errno.EADDRNOTAVAIL:
        return "no network interface of this host has that address"
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges"
    return os.strerror(error.errno) if error.errno else str(error)
