"""The Node library's own tests, and its package: what it declares, and the example that its README names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import skips
from conformance.runners import ROOT, node_program
from fakes import fake_public_server

LIBRARY = ROOT / "clients" / "node"


def run(*arguments: str, directory: Path = LIBRARY) -> subprocess.CompletedProcess[str]:
    command = [*node_program("@grpc/grpc-js"), *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)


def test_its_own_tests_pass() -> None:
    result = run("--test", "client.test.js", "resume.test.js")
    assert result.returncode == 0, result.stdout
    assert int(re.search(r"^# pass (\d+)", result.stdout, re.MULTILINE)[1]) >= 10


def test_the_example_streams_an_answer() -> None:
    with fake_public_server.running() as server:
        result = run("example.js", "one two three", server.target)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("ONE TWO THREE")


def test_the_example_says_what_failed() -> None:
    result = run("example.js", "x", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE")


CANCELLING = """
import { connect } from './index.js';

const client = connect(process.argv[1]);
const given = new AbortController();
try {
  for await (const { delta } of client.generateStream({ text: 'one two' }, { signal: given.signal })) {
    if (delta) given.abort();
  }
} catch (error) {
  console.log(error.code);
}
const unary = client.generate({ text: 'one' }, { signal: AbortSignal.timeout(100) });
await unary.catch((error) => console.log(error.code));
await client.generate({ text: 'one' }, { signal: AbortSignal.abort() }).catch((error) => console.log(error.code));
client.close();
"""


def test_a_signal_cancels_its_call() -> None:
    with fake_public_server.running() as server:
        server.hangs = True
        result = run("--input-type=module", "--eval", CANCELLING, server.target)
        assert result.stdout.split() == ["CANCELLED"] * 3, result.stderr
        assert server.was_cancelled.wait(20)


def test_its_package_is_complete(tmp_path: Path) -> None:
    npm = skips.require_program("npm", how="make system-deps")
    # Packing copies protos beside the library for a moment, half of which other tests that run could read.
    library = copy_of_library(tmp_path / "checkout")
    subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(tmp_path)], cwd=library, check=True, capture_output=True
    )
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as package:
        package.extractall(tmp_path, filter="data")
    (tmp_path / "node_modules").symlink_to(ROOT / "node_modules")
    with fake_public_server.running() as server:
        result = run("example.js", "one two", server.target, directory=tmp_path / "package")
    assert result.stdout.startswith("ONE TWO"), result.stderr
    # What was copied into the package is not left behind.
    assert not (library / "protos").exists()


def copy_of_library(root: Path) -> Path:
    """With what its package takes from the rest of the repository, in the same places."""
    shared = LIBRARY.parent / "service_config.json"
    shutil.copytree(ROOT / "protos", root / "protos")
    library = shutil.copytree(LIBRARY, root / "clients" / LIBRARY.name)
    shutil.copy(shared, library.parent)
    return library


def test_its_dependencies_are_those_that_the_tests_use() -> None:
    own = json.loads((LIBRARY / "package.json").read_text())["dependencies"]
    tested = json.loads((ROOT / "package.json").read_text())["devDependencies"]
    assert {name: tested[name] for name in own} == own
