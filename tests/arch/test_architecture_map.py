"""ARCHITECTURE.md lists every source file once, and no file that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def listed_files() -> list[str]:
    files, base = [], ""
    for line in TEXT.splitlines():
        if heading := re.match(r"### .*`([\w/]+)/`$", line):
            base = heading[1]
        elif row := re.match(r"\| `([\w/]+\.py)` \|", line):
            files.append(row[1] if row[1].startswith("bench/") else f"{base}/{row[1]}")
    return files


def source_files() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for root in ("services", "shared", "clients/python", "bench")
        for path in (ROOT / root).rglob("*.py")
        if path.name != "__init__.py" and not re.search(r"_pb2(_grpc)?\.py$", path.name)
    ]


def test_map_and_tree_agree():
    assert sorted(listed_files()) == sorted(source_files())


@pytest.mark.parametrize("client", ["node", "go", "cpp"])
def test_map_and_clients_of_other_languages_agree(client: str):
    section = TEXT.split(f"`clients/{client}/`\n")[1].split("\n### ")[0]
    listed = re.findall(r"`([\w/.]+\.(?:js|ts|go|cc|h))`(?=[^|]* \|.* \|$)", section, re.MULTILINE)
    root = ROOT / "clients" / client
    files = {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.suffix in (".js", ".ts", ".go", ".cc", ".h") and not {"node_modules", "v1"} & set(path.parts)
    }
    assert sorted(listed) == sorted(files)


def test_the_life_of_a_request_names_files_that_exist():
    prose = TEXT.split("## Map")[0]
    names = set(re.findall(r"`(?:\w+/)*(\w+\.(?:py|proto))`", prose))
    existing = {path.name for root in ("services", "shared", "protos") for path in (ROOT / root).rglob("*.*")}
    assert names
    assert names <= existing


def test_readme_names_the_real_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", README + TEXT)) - {"and"} <= targets
