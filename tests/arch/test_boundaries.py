"""The rules of architecture that the import contracts in pyproject.toml can not express, read from the source text."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from skips import require_program

ROOT = Path(__file__).parent.parent.parent
SOURCE_ROOTS = ("services", "shared", "clients/python")
SOURCES = sorted(
    path.relative_to(ROOT)
    for root in SOURCE_ROOTS
    for path in (ROOT / root).rglob("*.py")
    if not re.search(r"_pb2(_grpc)?\.py$", path.name)
)
TESTS = sorted(path.relative_to(ROOT) for top in ("tests", "bench") for path in (ROOT / top).rglob("*.py"))
PURE = [
    path
    for path in SOURCES
    if ({"scheduler", "kv_cache"} & set(path.parts) and "engine_core" in path.parts)
    or path.stem in ("packed_logprobs", "histogram")
]
KV_CACHE = [path for path in PURE if "kv_cache" in path.parts]

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "putenv"}
# `python -m` puts source roots on sys.path, where a top-level name would win over the standard library's.
SHADOWING_NAMES = {"logging", "queue", "types", "tokenize", "signal", "socket", "select", "random", "time"}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
# Pure: no time, no randomness, no I/O, no threads. An allow-list, because tomorrow's impure module has a new name.
PURE_STDLIB = {
    "__future__", "abc", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "itertools", "math", "operator", "struct", "sys", "typing",
}  # fmt: skip
PURE_OWN = (
    *("engine_core.scheduler", "engine_core.kv_cache"),
    *("stepwire.errors", "stepwire.histogram", "stepwire.packed_logprobs"),
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names.append(node.module or "")
    return names


def matches(paths: list[Path], pattern: str) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(pattern, line)
    ]


def test_the_rules_see_the_sources():
    names = {str(path) for path in SOURCES}
    assert "shared/stepwire/settings.py" in names
    assert "services/engine_core/scheduler/request.py" in names
    assert KV_CACHE


def test_environment_is_read_in_one_file():
    readers = {
        str(path)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and ENVIRONMENT_NAMES & _names(node))
    }
    assert readers == {"shared/stepwire/settings.py"}


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def test_module_names_say_something_and_shadow_nothing():
    assert [path for path in SOURCES if path.stem in BANNED_NAMES | SHADOWING_NAMES] == []


def test_pure_modules_import_pure_modules_only():
    impure = [
        f"{path}: {name}"
        for path in PURE
        for name in imported(path)
        if name not in PURE_STDLIB and not name.startswith(PURE_OWN)
    ]
    assert impure == []


def test_kv_cache_does_not_know_requests():
    knowing = [
        f"{path}: {node.id}"
        for path in KV_CACHE
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Name) and node.id in {"Request", "RequestStatus", "SchedulerOutput"}
    ]
    assert knowing == []


def test_modules_say_what_they_are_for():
    silent = [path for path in [*SOURCES, *TESTS] if tree(path).body and not ast.get_docstring(tree(path))]
    assert silent == []


def test_files_hold_one_idea():
    long = [
        f"{path}: {lines} lines"
        for path in SOURCES
        if (lines := len((ROOT / path).read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    assert long == []


def test_functions_fit_on_a_screen():
    long = [
        f"{path}: {node.name}: {length} lines"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.body[0].lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_assert_as_validation():
    # python -O removes them.
    found = [
        f"{path}:{node.lineno}" for path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_no_unfinished_work():
    assert matches(SOURCES, r"\b(TODO|FIXME|XXX|NotImplementedError)\b") == []


def test_type_ignores_name_their_code_and_reason():
    assert matches(SOURCES, r"# type: ignore(?!\[[\w, -]+\]\s+# \S)") == []


@pytest.mark.parametrize("package", ["frontend", "engine_core", "launcher", "offline", "stepwire"])
def test_source_roots_are_not_packages(package: str):
    for root in SOURCE_ROOTS:
        assert not (ROOT / root / "__init__.py").exists()
    assert any((ROOT / root / package).is_dir() for root in SOURCE_ROOTS)


def test_protos_have_one_path_each():
    for proto in (ROOT / "protos").rglob("*.proto"):
        package = re.search(r"^package ([\w.]+);", proto.read_text(encoding="utf-8"), re.MULTILINE)
        assert package is not None
        assert package[1].replace(".", "/") == str(proto.parent.relative_to(ROOT / "protos"))


def test_git_ignores_no_source():
    # An unanchored pattern such as `models/` would drop a package from every clone and from the wheel.
    git = require_program("git", how="install git")
    command = [
        git,
        "ls-files",
        "--others",
        "--ignored",
        "--exclude-standard",
        *SOURCE_ROOTS,
        "protos",
        "tests",
        "scripts",
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [path for path in found if "__pycache__" not in path and not path.endswith(".pyc")] == []
