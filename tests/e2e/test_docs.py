"""Blocks of the documentation that stand behind `<!-- runs -->` are run as they stand, but for the ports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import ROOT, Checkout
from free_ports import free_port
from running_stack import SERVING, running_stack
from skips import require_program

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"(?ms)^<!-- runs -->\n+```sh\n(.*?)^```$")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCKS = [
    (page, number, found[1])
    for page in PAGES
    for number, found in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
]


@pytest.fixture(scope="module")
def checkout(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    require_program("curl", how="apt-get install curl")
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        engine = stack.engine("--served-model-name", "SmolLM2-135M-Instruct")
        http_port = free_port()
        frontend = stack.frontend(engine, http_port=http_port)
        frontend.wait_for_health(SERVING)
        place = Checkout(
            tmp_path_factory.mktemp("checkout"),
            {
                50051: frontend.port,
                50052: frontend.admin_port,
                50061: engine.port,
                8000: http_port,
                9100: frontend.metrics_port,
                9101: engine.metrics_port,
            },
        )
        (place.path / "models").mkdir()
        (place.path / "models/SmolLM2-135M-Instruct-fp32").symlink_to(embedded_model_dir)
        yield place


def test_every_mark_has_a_block_and_every_page_of_commands_has_some():
    marks = sum(page.read_text(encoding="utf-8").count("<!-- runs -->") for page in PAGES)
    assert marks == len(BLOCKS)
    pages = {page.stem for page, _, _ in BLOCKS}
    assert pages >= {"install", "sizing", "upgrade", "security", "troubleshooting", "runbook"}


@pytest.mark.parametrize("text", [pytest.param(text, id=f"{page.stem}-{number}") for page, number, text in BLOCKS])
def test_a_block_ends_well(checkout: Checkout, text: str) -> None:
    if "openssl" in text:
        require_program("openssl", how="apt-get install openssl")
    checkout.run(text)


def test_behind_all_of_them_requests_are_served(checkout: Checkout) -> None:
    command = ".venv/bin/stepwire generate hello --max-tokens 4 --target 127.0.0.1:50051"
    assert checkout.run(command)
