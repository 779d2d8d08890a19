"""The conformance runner of the synchronous Python client: `python python_runner.py TARGET [CA_FILE]`."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

from python_calls import Call

from stepwire_client import CallError, Client

clients: dict[tuple[str, str], Client] = {}


def run(call: Call) -> dict[str, Any]:
    key = (call.token, call.client_class)
    client = clients.get(key) or clients.setdefault(key, Client(sys.argv[1], **call.client_options))
    try:
        answer = call.method.call(client, call.request, call.options)
        if call.method.is_stream:
            # Closing it cancels the call, as it does for every user of the client.
            with closing(answer) as messages:
                any(call.take(message) for message in messages)
        else:
            call.take(call.method.to_message(answer))
    except CallError as error:
        call.fail(error)
    return call.reply()


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(Call(json.loads(line)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
