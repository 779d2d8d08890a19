"""The fields of an InferencePool that we may use, as its public API has them in release 1.4.

No package has it. Stricter than the API server: a field that is not here is refused, also one that the API knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema

from manifests import Manifest, name_of


def _closed(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


_NAME = {"type": "string", "minLength": 1, "maxLength": 253, "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_PORT = _closed(("number",), number={"type": "integer", "minimum": 1, "maximum": 65535})
_LABELS = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": 64,
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
    },
}
_PICKER = _closed(
    # The port may be left out for kinds other than Service, which is the one that we name by leaving the kind out.
    ("name", "port"),
    name=_NAME,
    port=_PORT,
    failureMode={"enum": ["FailOpen", "FailClose"]},
)
_SPEC = _closed(
    ("selector", "targetPorts", "endpointPickerRef"),
    # Equality alone: matchExpressions is unknown here.
    selector=_closed(("matchLabels",), matchLabels=_LABELS),
    targetPorts={"type": "array", "items": _PORT, "minItems": 1, "maxItems": 8, "uniqueItems": True},
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
    endpointPickerRef=_PICKER,
)
_SCHEMA = _closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "inference.networking.k8s.io/v1"},
    kind={"const": "InferencePool"},
    metadata={"type": "object"},
    spec=_SPEC,
)


def pool_findings(pool: Manifest) -> Iterator[str]:
    """One sentence for each thing that is wrong."""
    for error in jsonschema.Draft202012Validator(_SCHEMA).iter_errors(pool):
        place = "/".join(map(str, error.path))
        yield f"{name_of(pool)}: {place}: {error.message}"
