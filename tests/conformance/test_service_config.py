"""The service config that all clients share, clients/service_config.json."""

from __future__ import annotations

import json

from conformance.runners import ROOT
from stepwire_client.service_config import service_config

SERVICE_CONFIG = json.loads((ROOT / "clients" / "service_config.json").read_text(encoding="utf-8"))


def test_pythons_channels_have_the_shared_service_config():
    assert json.loads(service_config(is_balanced=False)) == SERVICE_CONFIG


def test_no_stream_is_repeated_by_grpc():
    names = [name for method in SERVICE_CONFIG["methodConfig"] for name in method["name"]]
    assert {"service": "stepwire.v1.GenerationService", "method": "Generate"} in names
    assert not any(name["service"].endswith("ChatService") for name in names)
    assert {"service": "stepwire.v1.GenerationService"} not in names
