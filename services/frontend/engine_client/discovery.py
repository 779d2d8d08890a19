"""The addresses of the engines: those that are listed, and those behind DNS names, which are asked again and again.

Owner: one task on the event loop; the look-ups run in a thread. Knows addresses only, never whether an engine is there.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

DNS_PREFIX = "dns:///"
POLL_S = 5.0


class Discovery:
    """`listed` at once; after `start` also the addresses behind names, whenever they have been looked up."""

    def __init__(self, endpoints: Sequence[str], on_addresses: Callable[[Sequence[str]], None]) -> None:
        self.listed = [endpoint for endpoint in endpoints if not endpoint.startswith(DNS_PREFIX)]
        names = [endpoint.removeprefix(DNS_PREFIX) for endpoint in endpoints if endpoint.startswith(DNS_PREFIX)]
        self._found: dict[str, list[str]] = {name: [] for name in names}
        self._problems: dict[str, str] = {}
        self._on_addresses = on_addresses
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look names up, if there are any."""
        if self._found:
            self._task = asyncio.create_task(self._poll(), name="engine discovery")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _poll(self) -> None:
        while True:
            await asyncio.gather(*map(self._look_up, self._found))
            found = (address for addresses in self._found.values() for address in addresses)
            self._on_addresses(list(dict.fromkeys([*self.listed, *found])))
            await asyncio.sleep(POLL_S)

    async def _look_up(self, name: str) -> None:
        try:
            self._found[name] = await resolve_addresses(name)
        except (OSError, UnicodeError) as error:
            # Says something about DNS and nothing about engines: those that are known stay.
            problem = str(error)
        else:
            problem = ""
        if problem != self._problems.get(name, ""):
            self._problems[name] = problem
            logger.warning("DNS name %s of the engines: %s", name, problem or "can be resolved again")


async def resolve_addresses(name: str) -> list[str]:
    """Every address behind host:port, sorted. Raises OSError, also when there is none."""
    host, _, port = name.rpartition(":")
    infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    # An engine with both kinds of addresses has one of each, and one is enough to reach it.
    family = min((info[0] for info in infos), key=lambda kind: kind != socket.AF_INET)
    return sorted({_join(info[4][0], port) for info in infos if info[0] == family})


def _join(host: object, port: str) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
