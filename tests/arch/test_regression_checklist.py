"""The regression checklist: faults of other engines, each with a test that would notice it here.

A test that proves a row carries `@pytest.mark.regression(row)`; `pytest -m regression` runs them all.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent.parent

# The checklist in short, by row.
ROWS: dict[int | str, str] = {
    1: "the owner is killed, before and after the load: the engine ends, or the session's blocks are freed",
    2: "log-probabilities above 64 KiB back to back, compared byte by byte",
    3: "a caller's id is used again right after an abort, while the old one is still in the step",
    4: "the only request is aborted: the workers hear of it once, in an empty step",
    5: "an abort during the final step wins, with synchronous and asynchronous scheduling",
    6: "an abort before there is any block, with connector hooks counted",
    7: "an abort during a KV load, in both orders",
    8: "no block is handed out while an older step may write it",
    9: "a cache full of fenced blocks causes no preemption cascade",
    10: "broken grammars of every kind mixed with good ones",
    11: "preemption at every point of asynchronous scheduling; the in-flight counter never goes below 0",
    12: "some request always progresses; one that never fits is refused",
    13: "one poisoned detokenizer, 99 other streams unharmed",
    14: "a token-array prompt cut inside a character: no prompt text in the first delta",
    15: "min_tokens against eos, stop ids and stop strings",
    16: "stop tokens that are not special tokens leave no text and no id",
    17: "a stop string split over deltas and inside reasoning; ids and text of each delta agree",
    18: "n = 4 with different ends, merged slots, abort of the parent",
    19: "soak of 200 000 short requests, resident memory within a bound",
    20: "1 000 requests without the collector leave no Request behind",
    21: "no full garbage collection while serving",
    22: "SIGTERM at 20 random moments, during the load and twice too",
    23: "StartWave and pause messages delayed and in another order",
    24: "two tenants with different salts share no block and see no hit; the hash is SHA-256",
    25: "every death shows its cause at the client; a clean exit logs no death",
    "utility future cancelled": "",
    "utility pending at death": "",
    "fenced frees keep eviction order": "",
    "free list stays ordered after long runs": "",
    "fairness of the 128 slices": "",
    "forward error fails all pending requests": "and sets the state, and the memory is free within 60 s",
    "engine start error releases memory": "",
    "output error fails one request": "",
}

# Rows about what does not exist yet. A part of row 15 (speculation) does not either.
NOT_YET: dict[int | str, str] = {
    6: "there are no KV connectors",
    7: "there are no KV connectors",
    23: "there are no engines in lock-step",
}


@cache
def marked() -> dict[int | str, list[str]]:
    """Where each row is marked, read from the source: a run of a few tests must not change the answer."""
    found: dict[int | str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for row in _rows(node):
                found.setdefault(row, []).append(f"{path.relative_to(TESTS)}:{node.lineno}")
    return found


def _rows(node: ast.AST) -> list[int | str]:
    """Of a decorated test."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    rows = []
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.regression":
            [argument] = decorator.args
            assert isinstance(argument, ast.Constant)
            rows.append(argument.value)
    return rows


def test_every_row_has_a_test_or_is_about_what_does_not_exist():
    assert sorted(row for row in ROWS if isinstance(row, int)) == list(range(1, 26))
    assert [row for row in ROWS if row not in marked() and row not in NOT_YET] == []


def test_no_test_proves_a_row_that_is_none_or_does_not_exist():
    assert {row: places for row, places in marked().items() if row not in ROWS or row in NOT_YET} == {}


def test_marks_are_on_tests():
    loose = [
        f"{path.relative_to(TESTS)}:{node.lineno} {node.name}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _rows(node) and not (path.name.startswith("test_") and node.name.startswith("test_"))
    ]
    assert loose == []
