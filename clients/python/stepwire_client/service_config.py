"""The service config of a channel: which calls gRPC repeats by itself, and how calls are spread over servers.

The file is the one that the clients of all languages share. GenerateStream is absent from it: a client resumes a
stream, it never repeats one.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("service_config.json")


@cache
def service_config(*, is_balanced: bool) -> str:
    """The JSON text. Balanced: round robin over the addresses of a name, those alone that say they serve."""
    config: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    if is_balanced:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": "stepwire.v1.GenerationService"}
    return json.dumps(config)
