"""The page of --chat-page in a real browser, against both real processes and the real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from free_ports import free_port
from running_stack import SERVING, greedy_by_default, running_stack
from skips import require_program

pytestmark = pytest.mark.slow

TIMEOUT_S = 60
# As root and without a display; nothing is looked up outside this machine.
BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@pytest.fixture(scope="module")
def address(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # The page asks for no temperature, and a sampled story may be over before it is stopped.
    model_dir = greedy_by_default(embedded_model_dir, tmp_path_factory.mktemp("greedy"))
    with running_stack(model_dir, tmp_path_factory.mktemp("cache")) as stack:
        port = free_port()
        stack.frontend(stack.engine(), http_port=port, flags=("--chat-page",)).wait_for_health(SERVING)
        yield f"http://127.0.0.1:{port}/chat/"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    driver_path = require_program("chromedriver", how="apt-get install chromium-driver")
    options = ChromeOptions()
    options.binary_location = require_program("chromium", how="apt-get install chromium")
    for flag in (*BROWSER_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(driver_path))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(browser: Chrome, address: str) -> Chrome:
    browser.get(address)
    return browser


def part(page: Chrome, name: str) -> WebElement:
    return page.find_element(By.ID, name)


def ask(page: Chrome, question: str) -> None:
    part(page, "question").send_keys(question)
    part(page, "send").click()


def wait_for_end(page: Chrome) -> str:
    """The status line once the answer is over."""
    WebDriverWait(page, TIMEOUT_S).until(lambda page: part(page, "send").is_displayed())
    return part(page, "status").text


def texts(page: Chrome, kind: str) -> list[str]:
    return [found.text for found in page.find_elements(By.CLASS_NAME, kind)]


def test_a_question_is_answered_as_it_streams_and_the_next_one_sees_it(page: Chrome) -> None:
    ask(page, "What is the capital of France? Answer in one word.")
    assert wait_for_end(page).endswith(" tokens")
    ask(page, "And of Italy?")
    assert wait_for_end(page).endswith(" tokens")
    answers = texts(page, "assistant")
    assert len(answers) == 2
    assert all(answers)
    sent = page.execute_script("return conversation.map((message) => message.role)")
    assert sent == ["user", "assistant", "user", "assistant"]
    assert part(page, "model").text
    severe = [
        entry for entry in page.get_log("browser") if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ]
    assert severe == []


def test_markup_is_shown_as_text(page: Chrome) -> None:
    question = "<img src=x onerror=\"document.title='harmed'\"> 你好 👩‍🚀"
    page.execute_script("arguments[0].value = arguments[1]", part(page, "question"), question)
    part(page, "send").click()
    assert texts(page, "user") == [question]
    # By script: the answer may be over already, and the button hidden.
    page.execute_script("arguments[0].click()", part(page, "stop"))
    wait_for_end(page)
    assert page.title == "stepwire chat"


def test_an_answer_can_be_stopped(page: Chrome) -> None:
    ask(page, "Write a very long story about a river, its towns and everyone who lives there.")
    WebDriverWait(page, TIMEOUT_S).until(lambda page: texts(page, "assistant"))
    part(page, "stop").click()
    assert wait_for_end(page) == "stopped"


def test_a_refusal_is_shown_in_words(page: Chrome) -> None:
    page.execute_script("arguments[0].value = 'many words '.repeat(20000)", part(page, "question"))
    part(page, "send").click()
    wait_for_end(page)
    assert "context" in texts(page, "error")[0]
