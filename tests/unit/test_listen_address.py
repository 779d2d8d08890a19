"""Bind failures are one sentence that names the address."""

from __future__ import annotations

import socket

import grpc
import pytest
from prometheus_client import CollectorRegistry

from stepwire import grpc_options, grpc_server
from stepwire.listen_address import BindError, bind_error, join
from stepwire.metrics import serve_http


@pytest.fixture
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_grpc_port_in_use(taken_port: int):
    server = grpc.server(None, options=grpc_options.SERVER)
    with pytest.raises(BindError, match=rf"^cannot listen on 127\.0\.0\.1:{taken_port}: port in use by"):
        grpc_server.bind(server, "127.0.0.1", taken_port)
    server.stop(None)


def test_metrics_port_in_use(taken_port: int):
    with pytest.raises(BindError, match=f"127.0.0.1:{taken_port}: port in use"):
        serve_http(taken_port, CollectorRegistry(), lambda: True, lambda: True)


def test_address_of_another_host():
    assert "no network interface" in str(bind_error("192.0.2.1", 50051))


def test_two_servers_never_share_a_port():
    first, second = (grpc.server(None, options=grpc_options.SERVER) for _ in range(2))
    port = grpc_server.bind(first, "127.0.0.1", 0)
    with pytest.raises(BindError):
        grpc_server.bind(second, "127.0.0.1", port)
    for server in (first, second):
        server.stop(None)


def test_ipv6_addresses_get_brackets():
    assert join("::1", 5) == "[::1]:5"
    assert join("localhost", 5) == "localhost:5"
