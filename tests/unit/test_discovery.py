"""Addresses behind DNS names, as a pool is told of them."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
import uvloop

from frontend.engine_client import discovery
from frontend.engine_client.discovery import Discovery, resolve_addresses


class Names:
    """What DNS answers, look-up by look-up; the last answer stays."""

    def __init__(self, **answers: list[list[str] | Exception]) -> None:
        self.answers = answers

    async def resolve(self, name: str) -> list[str]:
        await asyncio.sleep(0)
        answers = self.answers[name.partition(":")[0]]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def told(monkeypatch: pytest.MonkeyPatch, endpoints: list[str], names: Names, num: int) -> list[list[str]]:
    """What the first `num` rounds of look-ups tell."""
    monkeypatch.setattr(discovery, "resolve_addresses", names.resolve)
    monkeypatch.setattr(discovery, "POLL_S", 0)
    news: asyncio.Queue[list[str]] = asyncio.Queue()
    found = Discovery(endpoints, lambda addresses: news.put_nowait(list(addresses)))
    found.start()
    rounds = [await asyncio.wait_for(news.get(), 30) for _ in range(num)]
    found.close()
    return rounds


async def test_listed_addresses_come_first_and_names_are_asked_again(monkeypatch: pytest.MonkeyPatch):
    names = Names(first=[["a:1"], ["a:1", "b:1"], ["b:1"]], second=[["c:1", "listed:1"]])
    rounds = await told(monkeypatch, ["dns:///first:1", "listed:1", "dns:///second:1"], names, 3)
    assert rounds == [
        ["listed:1", "a:1", "c:1"],
        ["listed:1", "a:1", "b:1", "c:1"],
        ["listed:1", "b:1", "c:1"],
    ]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "no such name"), UnicodeError("label too long")])
async def test_a_name_that_cannot_be_resolved_keeps_what_is_known_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
):
    names = Names(engines=[["a:1"], error, error, error, ["b:1"]])
    with caplog.at_level(logging.WARNING):
        rounds = await told(monkeypatch, ["dns:///engines:1"], names, 5)
    assert rounds == [["a:1"]] * 4 + [["b:1"]]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert str(error) in said[0]
    assert "again" in said[1]


async def test_without_names_nothing_is_looked_up():
    found = Discovery(["a:1", "unix:/x"], lambda addresses: pytest.fail("nobody asked"))
    found.start()
    await asyncio.sleep(0)
    assert found.listed == ["a:1", "unix:/x"]
    found.close()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    ("name", "addresses"),
    [("localhost:7", ["127.0.0.1:7"]), ("[::1]:7", ["[::1]:7"]), ("127.0.0.2:7", ["127.0.0.2:7"])],
)
def test_real_look_ups(loop_factory, name: str, addresses: list[str]):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(resolve_addresses(name)) == addresses
