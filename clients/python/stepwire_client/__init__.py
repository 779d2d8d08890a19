"""Typed Python client of stepwire's public gRPC API. Needs neither torch nor a tokenizer."""

from __future__ import annotations

from stepwire_client.client import Client
from stepwire_client.credentials import Credentials
from stepwire_client.errors import CallError

__all__ = ["CallError", "Client", "Credentials"]
