"""The connections of a pool as addresses come and go. Owner: the event loop.

An address that is no longer wanted drains out of use: its engine gets no new requests, and is let go of when those it
runs have ended. Never closes a connection that has requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from frontend.engine_client.connection import EngineConnection
from frontend.engine_client.connection_state import ConnectionState

logger = logging.getLogger(__name__)


class Members:
    """`connections` are those of wanted addresses, and those that still drain."""

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], EngineConnection],
        is_busy: Callable[[EngineConnection], bool],
        on_gone: Callable[[], None],
    ) -> None:
        self.connections = [connect(address) for address in addresses]
        self._connect = connect
        self._is_busy = is_busy
        self._on_gone = on_gone
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to connect to the first ones."""
        for connection in self.connections:
            connection.start()

    def update(self, addresses: Sequence[str]) -> None:
        """From now on these addresses are wanted, and no others."""
        for connection in self.connections:
            connection.set_leaving(connection.endpoint not in addresses)
        known = {connection.endpoint for connection in self.connections}
        for address in addresses:
            if address not in known:
                self.connections.append(connection := self._connect(address))
                connection.start()
        self.let_go()

    def let_go(self) -> None:
        """Close those that leave and run nothing."""
        leaving = (one for one in self.connections if one.is_leaving and one.state is not ConnectionState.CLOSED)
        for connection in [one for one in leaving if not self._is_busy(one)]:
            self.connections.remove(connection)
            logger.info("engine %s at %s is let go of", connection.engine_id, connection.endpoint)
            task = asyncio.create_task(connection.close("its address has left", abort_running=False))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._on_gone()

    async def close(self, reason: str, *, abort_running: bool) -> None:
        """Say Goodbye to all."""
        closing = [connection.close(reason, abort_running=abort_running) for connection in self.connections]
        await asyncio.gather(*closing, *self._closing)
