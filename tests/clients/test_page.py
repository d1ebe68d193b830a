"""The page, in a real browser without a window: the system's Chromium, or playwright's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="the extra clients is not installed")

from playwright import sync_api as playwright

SCREENSHOTS = "MLX_SPECDEC_SCREENSHOTS"
"""Environment variable: a directory for pictures of the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Skips where no browser is installed."""
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    with playwright.sync_playwright() as running:
        try:
            browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except playwright.Error as problem:
            pytest.skip(f"no Chromium: {str(problem).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test where a script fails or where anybody else is asked."""
    page = browser.new_page(viewport={"width": 1100, "height": 720})
    problems: list[str] = []
    page.on("pageerror", lambda problem: problems.append(str(problem)))
    page.on("console", lambda message: _is_problem(message) and problems.append(message.text))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    yield page
    hosts = {url.split("/")[2] for url in requests if url.startswith("http")}
    page.close()
    assert problems == [] and len(hosts) == 1


def _is_problem(report: Any) -> bool:
    # Of an answer that is an error the browser itself tells as well.
    return report.type == "error" and not report.text.startswith("Failed to load resource")


def say(page: Any, text: str) -> Any:
    """Send a text, wait for the answer's end, and return it."""
    done = page.locator("article[data-done=true]")
    answer = done.nth(done.count())
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    answer.wait_for(timeout=60_000)
    return answer


def picture(page: Any, name: str) -> None:
    if directory := os.environ.get(SCREENSHOTS):
        page.screenshot(path=str(Path(directory) / f"{name}.png"))


def post(url: str, **body: Any) -> dict[str, Any]:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data)) as answer:
        return json.load(answer)


def test_a_text_is_gone_on_with(page: Any, shipped: str) -> None:
    page.goto(shipped)
    assert not page.is_visible("#key")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "60")
    prompt = "def read_lines(path):\n"
    answer = say(page, prompt)
    reply = post(f"{shipped}/v1/completions", prompt=prompt, temperature=0, max_tokens=60)
    text = answer.locator(".text")
    assert text.text_content() == prompt + reply["choices"][0]["text"]
    marked = text.locator(".drafted")
    assert marked.count() > 0
    assert page.text_content("#tokens") == str(reply["usage"]["completion_tokens"])
    drafted, accepted = page.text_content("#drafted"), page.text_content("#accepted")
    assert int(drafted) >= int(accepted.split()[0]) > 0
    assert page.text_content("#first").endswith(" ms")
    assert float(page.text_content("#speed")) > 0
    background = "element => getComputedStyle(element).backgroundColor"
    colored = marked.first.evaluate(background)
    picture(page, "completion")
    page.uncheck("#mark")
    assert marked.first.evaluate(background) != colored
    page.uncheck("#speculative")
    before = text.text_content()
    page.click("#reset")
    plain = say(page, prompt)
    assert plain.locator(".text").text_content() == before
    assert page.text_content("#accepted") == "0" and plain.locator(".drafted").count() == 0


def test_a_chat_goes_on(page: Any, root: str) -> None:
    page.goto(root)
    page.fill("#max_tokens", "30")
    page.fill("#seed", "3")
    first = say(page, "Who?").locator(".text").text_content()
    [message] = [{"role": "user", "content": "Who?"}]
    answer = post(f"{root}/v1/chat/completions", messages=[message], max_tokens=30, seed=3)
    assert first == answer["choices"][0]["message"]["content"]
    say(page, "<b>And</b>?")
    assert page.locator("article").count() == 4
    assert page.locator("article b").count() == 0
    assert "<b>And</b>?" in page.text_content("#talk")
    picture(page, "chat")
    page.click("#reset")
    assert page.locator("article").count() == 0


def begin_long_answer(page: Any, root: str) -> None:
    """Ask for a long answer, and wait for its first words."""
    page.goto(root)
    page.fill("#max_tokens", "3000")
    page.fill("#prompt", "Who?")
    page.click("#send")
    # Anything but the first few: the page lets nobody evaluate conditions in it.
    playwright.expect(page.locator("#tokens")).to_have_text(re.compile(r"\d{2,}"), timeout=60_000)


def test_an_answer_can_be_stopped(page: Any, root: str) -> None:
    begin_long_answer(page, root)
    page.click("#send")
    page.locator("article[data-done=true]").wait_for()
    assert 9 < int(page.text_content("#tokens")) < 3000


def test_a_new_conversation_knows_nothing_of_an_answer_that_was_under_way(
    page: Any, root: str
) -> None:
    begin_long_answer(page, root)
    page.click("#reset")
    playwright.expect(page.locator("#send")).to_have_text("Send")
    page.fill("#max_tokens", "30")
    page.fill("#seed", "3")
    text = say(page, "And?").locator(".text").text_content()
    message = {"role": "user", "content": "And?"}
    answer = post(f"{root}/v1/chat/completions", messages=[message], max_tokens=30, seed=3)
    assert text == answer["choices"][0]["message"]["content"]


def test_what_goes_wrong_is_reported(page: Any, root: str) -> None:
    page.goto(root)
    page.fill("#temperature", "-1")
    answer = say(page, "Who?")
    assert "temperature must be 0 or a number from" in answer.locator(".problem").text_content()
