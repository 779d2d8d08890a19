"""Typed Python clients of stepwire's public gRPC API. They need neither torch nor a tokenizer."""

from __future__ import annotations

from stepwire_client.aio_client import AsyncClient
from stepwire_client.call_facts import CallFacts
from stepwire_client.client import Client
from stepwire_client.credentials import Credentials
from stepwire_client.deadline import Deadline
from stepwire_client.errors import CallError

__all__ = ["AsyncClient", "CallError", "CallFacts", "Client", "Credentials", "Deadline"]
