"""The token file and the gate: who is let in, with what, and that no text repeats a token."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from frontend.access.gate import Gate
from frontend.access.rate import RateLimit
from frontend.access.token_file import read_token_file
from stepwire.errors import AccessError, OverloadedError

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
ALICE_DIGEST = hashlib.sha256(ALICE.encode()).hexdigest()
FILE = f"""
[tokens.alice]
sha256 = "{ALICE_DIGEST}"
class = "gold"
requests_per_minute = 2
share = 0.5
models = ["small"]
admin = true
[tokens.bob]
token = "{BOB}"
tokens_per_minute = 60
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(FILE)
    return path


def test_without_a_file_everybody_is_let_in_under_the_header_they_send():
    caller = Gate(None).identify("Bearer whatever", "silver")
    assert (caller.key, caller.client_class, caller.name, caller.share) == ("Bearer whatever", "silver", "", 1.0)
    Gate(None).identify("", for_admin=True)


def test_a_token_or_its_digest_is_known_and_its_class_wins(path: Path, clock: Clock):
    gate = Gate(path, clock)
    alice = gate.identify(f"bearer {ALICE}", "claimed")
    assert (alice.key, alice.client_class, alice.share) == ("alice", "gold", 0.5)
    bob = gate.identify(f"Bearer {BOB}", "claimed")
    assert (bob.name, bob.client_class) == ("bob", "claimed")
    assert gate.client_classes == {"gold"}


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", f"Basic {ALICE}", "Bearer unknown", f"Bearer {ALICE_DIGEST}"]
)
def test_others_are_not_let_in_and_their_header_is_not_repeated(path: Path, header: str):
    gate = Gate(path)
    with pytest.raises(AccessError) as caught:
        gate.identify(header)
    assert caught.value.reason == "UNAUTHENTICATED"
    assert gate.name_of(header) == ""
    assert "unknown" not in str(caught.value).replace("not known", "")


def test_models_and_admin_are_permissions(path: Path):
    gate = Gate(path)
    gate.identify(f"Bearer {ALICE}", for_admin=True).check_model("small")
    gate.identify(f"Bearer {BOB}").check_model("large")
    for forbidden in (
        lambda: gate.identify(f"Bearer {ALICE}").check_model("large"),
        lambda: gate.identify(f"Bearer {BOB}", for_admin=True),
    ):
        with pytest.raises(AccessError) as caught:
            forbidden()
        assert caught.value.reason == "PERMISSION_DENIED"


def test_requests_of_a_minute_are_refused_with_the_time_to_wait(path: Path, clock: Clock):
    gate = Gate(path, clock)
    use = gate.identify(f"Bearer {ALICE}").use
    use.take_request()
    use.take_request()
    with pytest.raises(OverloadedError) as caught:
        use.take_request()
    assert (caught.value.reason, caught.value.retry_after_ms) == ("RATE_LIMITED", 30_000)
    [violation] = caught.value.quota
    assert (violation.subject, violation.description) == ("token:alice", "2 requests a minute are used up")
    clock.now = 30.0
    use.take_request()


def test_generated_tokens_are_paid_back_before_the_next_request(path: Path, clock: Clock):
    use = Gate(path, clock).identify(f"Bearer {BOB}").use
    use.take_request()
    use.take_prompt(10)
    use.count_tokens(110)
    with pytest.raises(OverloadedError, match="60 tokens a minute") as caught:
        use.take_request()
    assert caught.value.retry_after_ms == 61_000
    clock.now = 61.0
    use.take_request()


def test_a_prompt_larger_than_a_minute_is_taken_when_nothing_is_owed(clock: Clock):
    rate = RateLimit(60, clock)
    assert rate.wait_s(1000) == 0
    rate.take(1000)
    assert rate.wait_s(1) == 941


def test_a_changed_file_is_read_again_and_rates_that_stay_keep_their_count(path: Path, clock: Clock):
    gate = Gate(path, clock)
    for _ in range(2):
        gate.identify(f"Bearer {ALICE}").use.take_request()
    path.write_text(FILE.replace('class = "gold"', 'class = "silver"').partition("[tokens.bob]")[0])
    gate.refresh()
    alice = gate.identify(f"Bearer {ALICE}")
    assert alice.client_class == "silver"
    with pytest.raises(OverloadedError):
        alice.use.take_request()
    with pytest.raises(AccessError):
        gate.identify(f"Bearer {BOB}")


@pytest.mark.parametrize("content", [None, "nonsense ]", "[tokens.x]\n"])
def test_a_file_that_has_become_wrong_changes_nothing_and_is_said_once(path: Path, caplog, content: str | None):
    gate = Gate(path)
    path.unlink()
    if content is not None:
        path.write_text(content)
    with caplog.at_level(logging.ERROR):
        gate.refresh()
        gate.refresh()
    assert gate.identify(f"Bearer {ALICE}").name == "alice"
    assert len(caplog.records) == 1
    path.write_text(FILE.replace("tokens.alice", "tokens.carol"))
    gate.refresh()
    assert gate.identify(f"Bearer {ALICE}").name == "carol"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("", "tokens"),
        ("[tokens]", "tokens"),
        ("[tokens.x]\nclass = 'a'", "tokens.x: needs either sha256 or token"),
        ("[tokens.x]\nsha256 = 'SECRET'", "tokens.x.sha256"),
        ("[tokens.x]\ntoken = 'SECRET'", "tokens.x: a token of less than"),
        ("[tokens.x]\ntoken = 'SECRET-0123456789'\nrate = 5", "tokens.x.rate"),
        ("[tokens.x]\ntoken = 'SECRET-0123456789'\nshare = 2", "tokens.x.share"),
        ("[tokens.x]\ntoken = 'SECRET-0123456789'\nmodels = 'a'", "tokens.x.models"),
        ("[tokens.x]\ntoken = 'SECRET-0123456789'\n[tokens.y]\ntoken = 'SECRET-0123456789'", "the same token"),
        ("[tokens.x]\ntoken = 'SECRET-0123456789'\ntoken = 'SECRET'", "is not TOML (at "),
    ],
)
def test_mistakes_in_the_file_are_placed_and_not_quoted(tmp_path: Path, content: str | None, said: str):
    path = tmp_path / "tokens.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as caught:
        read_token_file(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_workers_let_an_equal_part_of_a_rate_through_also_of_less_than_one_each(path: Path, clock: Clock):
    gates = [Gate(path, clock, num_parts=4) for _ in range(4)]
    uses = [gate.identify(f"Bearer {ALICE}").use for gate in gates]
    taken, refusals = 0, set()
    # Two a minute, for an hour.
    for _ in range(3600):
        clock.now += 1
        for use in uses:
            assert use is not None
            try:
                use.take_request()
                taken += 1
            except OverloadedError as error:
                refusals.add(str(error))
    assert 116 <= taken <= 122
    assert refusals == {"0.5 requests a minute are used up at this worker, one of 4"}
