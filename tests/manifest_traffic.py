"""Whether traffic arrives: routes, scrapes, policies and endpoints name ports and services that exist.

A check takes all objects of a build and yields a sentence for each fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from manifest_references import GRPC_SERVICES, ports_of, selected
from manifests import Manifest, containers_of, environment_of, name_of, of_kind, workloads

HEALTH = "grpc.health.v1.Health"
DNS_PREFIX = "dns:///"


def check_traffic(items: list[Manifest]) -> Iterator[str]:
    """All checks of this file."""
    for check in (_routed_services, _backends, _scrapes, _egress, _engine_endpoints):
        yield from check(items)


def _routed_services(items: list[Manifest]) -> Iterator[str]:
    for route in of_kind(items, "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            names = [match.get("method", {}).get("service", "") for match in rule.get("matches", [{}])]
            for name in names:
                if name.endswith(".AdminService"):
                    yield f"{name_of(route)}: lets the world administer: {name}"
                elif name not in GRPC_SERVICES | {HEALTH}:
                    yield f"{name_of(route)}: routes {name or 'everything'}, which no proto has"


def _backends(items: list[Manifest]) -> Iterator[str]:
    for route in of_kind(items, "GRPCRoute", "HTTPRoute"):
        for backend in (backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]):
            if not _has_port(items, backend["name"], backend["port"]):
                yield f"{name_of(route)}: there is no Service {backend['name']} with a port {backend['port']}"


def _has_port(items: list[Manifest], service: str, number: int) -> bool:
    found = [item for item in of_kind(items, "Service") if item["metadata"]["name"] == service]
    return any(port["port"] == number for item in found for port in item["spec"]["ports"])


def _scrapes(items: list[Manifest]) -> Iterator[str]:
    for monitor in of_kind(items, "PodMonitor"):
        names = {name for pod in selected(items, monitor["spec"]["selector"]) for name in ports_of(pod)}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] not in names:
                yield f"{name_of(monitor)}: scrapes port {endpoint['port']}, which its pods do not declare"


def _egress(items: list[Manifest]) -> Iterator[str]:
    """Rules that lead to pods of this namespace; what is elsewhere is not known here."""
    for policy in of_kind(items, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            for peer in (peer for peer in rule.get("to", []) if set(peer) == {"podSelector"}):
                pods = selected(items, peer["podSelector"])
                numbers = {number for pod in pods for number in ports_of(pod).values()}
                if not pods:
                    yield f"{name_of(policy)}: leads to no pod"
                for port in rule["ports"]:
                    if pods and port["port"] not in numbers:
                        yield f"{name_of(policy)}: leads to port {port['port']}, which its pods do not declare"


def _engine_endpoints(items: list[Manifest]) -> Iterator[str]:
    for workload in workloads(items):
        for container in containers_of(workload):
            value = environment_of(items, container).get("STEPWIRE_ENGINE_ENDPOINTS", "")
            for endpoint in filter(None, value.split(",")):
                host, _, port = endpoint.removeprefix(DNS_PREFIX).rpartition(":")
                if host == "127.0.0.1":
                    is_there = int(port) in ports_of(workload).values()
                else:
                    is_there = endpoint.startswith(DNS_PREFIX) and _has_port(items, host, int(port))
                if not is_there:
                    yield f"{name_of(workload)}: nothing here is the engine endpoint {endpoint}"
