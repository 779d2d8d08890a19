"""Stand-ins for `python -m engine_core` and `python -m frontend`, written to a directory that goes first on PYTHONPATH.

They obey the contract the launcher relies on: --owner parent, SIGTERM ends them, the frontend serves on --port when its
engines have started. What happens to them is appended to the file `events` of the directory.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent.parent

_SERVICE = """
import argparse, os, signal, sys, threading
sys.path.insert(0, {tests!r})

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--owner")
flags, rest = parser.parse_known_args()
assert flags.owner == "parent"

def record(what):
    with open({events!r}, "a") as events:
        events.write({name!r} + " " + what + "\\n")

def engines_have_started():
    with open({events!r}) as events:
        num_started = events.read().count("engine_core started ")
    return num_started > rest[rest.index("--engine-endpoints") + 1].count(",")

ended = threading.Event()
reason = []
def end(why):
    reason.append(why)
    ended.set()
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end, args=("SIGTERM",)).start())
if "TRACEPARENT" in os.environ:
    record("in trace " + os.environ["TRACEPARENT"])
record("started " + " ".join(rest))
if "--die" in rest:
    sys.exit("boom: no such weights")
def wait_for_parent():
    while os.read(0, 1):
        pass
    end("orphaned")
threading.Thread(target=wait_for_parent, daemon=True).start()
if {name!r} == "frontend":
    from fakes import fake_public_server
    while not engines_have_started() and not ended.wait(0.01):
        pass
    with fake_public_server.running(flags.port):
        ended.wait()
else:
    ended.wait()
record("ended by " + reason[0])
sys.exit(3 if "--stop-badly" in rest else 0)
"""

_PREPARE = """
import sys
if "--model" in sys.argv and "missing" in sys.argv:
    sys.exit("error: --model missing: no such directory")
"""


def write(directory: Path) -> Path:
    """Write the packages; returns the file of events."""
    events = directory / "events"
    events.touch()
    for name in ("engine_core", "frontend"):
        package = directory / name
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(_SERVICE.format(tests=str(TESTS), events=str(events), name=name))
    executor = directory / "engine_core" / "model_executor"
    executor.mkdir()
    (executor / "__init__.py").touch()
    (executor / "prepare_model.py").write_text(_PREPARE)
    return events
