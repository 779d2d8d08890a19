"""The conformance runner of the asyncio Python client: `python aio_runner.py TARGET [CA_FILE]`."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import Any

from python_calls import Call

from stepwire_client import AsyncClient, CallError

clients: dict[tuple[str, str], AsyncClient] = {}


async def run(call: Call) -> dict[str, Any]:
    key = (call.token, call.client_class)
    client = clients.get(key) or clients.setdefault(key, AsyncClient(sys.argv[1], **call.client_options))
    try:
        answer = call.method.call(client, call.request, call.options)
        if call.method.is_stream:
            # Closing it cancels the call, as it does for every user of the client.
            async with aclosing(answer) as messages:
                async for message in messages:
                    if call.take(message):
                        break
        else:
            call.take(call.method.to_message(await answer))
    except CallError as error:
        call.fail(error)
    return call.reply()


async def main() -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        sys.stdout.write(json.dumps(await run(Call(json.loads(line)))) + "\n")
        sys.stdout.flush()
    for client in clients.values():
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())
