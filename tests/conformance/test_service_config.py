"""The service config that all clients share, clients/service_config.json."""

from __future__ import annotations

import json

from conformance.runners import ROOT
from stepwire import grpc_options

SERVICE_CONFIG = json.loads((ROOT / "clients" / "service_config.json").read_text(encoding="utf-8"))


def test_pythons_channels_have_the_shared_service_config():
    assert json.loads(dict(grpc_options.CLIENT_CHANNEL)["grpc.service_config"]) == SERVICE_CONFIG


def test_no_stream_is_repeated_by_grpc():
    names = [name for method in SERVICE_CONFIG["methodConfig"] for name in method["name"]]
    assert {"service": "stepwire.v1.GenerationService", "method": "Generate"} in names
    assert not any(name["service"].endswith("ChatService") for name in names)
    assert {"service": "stepwire.v1.GenerationService"} not in names
