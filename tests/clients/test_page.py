"""The page, in a real browser without a window: the system's Chromium, or playwright's own."""

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
    if not page.is_visible("#max_tokens"):
        page.click("summary")
    page.fill("#max_tokens", "3000")
    page.fill("#prompt", "Who?")
    page.click("#send")
    # Anything but the first few: the page lets nobody evaluate conditions in it.
    playwright.expect(page.locator("#tokens")).to_have_text(re.compile(r"\d{2,}"), timeout=60_000)


@pytest.mark.parametrize("width", [1100, 390])
def test_stop_ends_an_answer_while_the_box_is_empty(page: Any, root: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 720})
    requests: list[Any] = []
    page.on("requestfailed", lambda request: requests.append(request))
    begin_long_answer(page, root)
    assert page.input_value("#prompt") == ""
    page.get_by_role("button", name="Stop").click()
    page.locator("article[data-done=true]").wait_for()
    playwright.expect(page.locator("#send")).to_have_text("Send")
    # The model may end an answer as well, but only the page aborts a request.
    assert [request.failure for request in requests] == ["net::ERR_ABORTED"]
    stopped = page.locator("article .notice")
    playwright.expect(stopped).to_have_text("You stopped this answer.")
    picture(page, f"stopped-{width}")
    page.reload()
    playwright.expect(stopped).to_have_text("You stopped this answer.")


def test_what_goes_wrong_is_reported(page: Any, root: str) -> None:
    page.goto(root)
    page.fill("#temperature", "-1")
    answer = say(page, "Who?")
    assert (
        "temperature: Input should be greater than or equal to 0"
        in answer.locator(".problem").text_content()
    )
    assert answer.locator("[role=alert]").count() == 1
    assert page.input_value("#prompt") == "Who?"


def test_a_conversation_survives_a_reload_and_goes_on(page: Any, root: str) -> None:
    page.goto(root)
    page.fill("#max_tokens", "20")
    page.fill("#seed", "3")
    say(page, "Who?")
    before = page.locator("#talk .text").all_text_contents()
    marked = page.locator("#talk .drafted").count()
    page.reload()
    playwright.expect(page.locator("article")).to_have_count(2)
    assert page.locator("#talk .text").all_text_contents() == before
    assert page.locator("#talk .drafted").count() == marked
    page.fill("#max_tokens", "20")
    page.fill("#seed", "3")
    goes_on = say(page, "And?").locator(".text").text_content()
    roles = ("user", "assistant", "user")
    said = zip(roles, [*before, "And?"], strict=True)
    messages = [{"role": role, "content": content} for role, content in said]
    answer = post(f"{root}/v1/chat/completions", messages=messages, max_tokens=20, seed=3)
    assert goes_on == answer["choices"][0]["message"]["content"]
    page.click("#reset")
    page.reload()
    playwright.expect(page.locator("#about")).to_contain_text("·")
    assert page.locator("article").count() == 0


def answer_with(page: Any, *pieces: str) -> list[Any]:
    """Let the page have an answer in these pieces. Returns the bodies that it sends from now on."""
    bodies: list[Any] = []

    def reply(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        choices = [{"delta": {"content": each}, "tokens": 1, "drafted": True} for each in pieces]
        choices.append({"delta": {}, "finish_reason": "stop"})
        body = "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in choices)
        route.fulfill(content_type="text/event-stream", body=f"{body}data: [DONE]\n\n")

    page.route("**/v1/chat/completions", reply)
    return bodies


def test_one_of_several_models_is_chosen(page: Any, root: str) -> None:
    names = ["first", "second one"]
    listed = {"data": [{"id": name} for name in names]}
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))

    loading = {"error": {"message": "Loading model", "code": "loading"}}
    loaded, loads = {"first"}, []

    def props(route: Any) -> None:
        name = "second one" if "second" in route.request.url else "first"
        if name in loaded:
            route.fulfill(json={**facts, "model_alias": name})
        else:
            route.fulfill(status=503, json=loading)

    with urllib.request.urlopen(f"{root}/props") as answer:
        facts = json.load(answer)
    page.route("**/props*", props)
    page.route("**/api/generate", lambda route: loads.append(route))
    page.goto(root)
    assert page.locator("#models option").all_text_contents() == names
    assert not page.is_visible("#model")
    bodies = answer_with(page, "Hello.")
    say(page, "Who?")
    page.select_option("#models", "second one")
    playwright.expect(page.locator("#about .waiting")).to_contain_text("Loading the model")
    assert page.locator("article").count() == 0
    page.fill("#prompt", "And you?")
    page.press("#prompt", "Enter")
    sign = page.locator("article .waiting")
    playwright.expect(page.locator("article")).to_contain_text("And you?")
    playwright.expect(sign).to_have_text(re.compile(r"Loading the model · \d+ s"))
    playwright.expect(page.locator("#send")).to_have_text("Stop")
    picture(page, "loading")
    page.keyboard.press("Escape")
    playwright.expect(page.locator("article")).to_have_count(0)
    assert page.input_value("#prompt") == "And you?"
    page.press("#prompt", "Enter")
    playwright.expect(sign).to_have_count(1)
    [load] = loads
    assert json.loads(load.request.post_data)["model"] == "second one"
    loaded.add("second one")
    load.fulfill(json={"done": True})
    page.locator("article[data-done=true]").last.wait_for()
    assert [body["model"] for body in bodies] == names
    assert [len(body["messages"]) for body in bodies] == [1, 1]
    page.select_option("#models", "first")
    playwright.expect(page.locator("article")).to_have_count(2)


def test_everything_is_reached_by_keyboard_and_has_a_name(page: Any, root: str) -> None:
    page.goto(root)
    playwright.expect(page.locator("#prompt")).to_be_focused()
    page.fill("#max_tokens", "3000")
    page.fill("#prompt", "Who?")
    page.press("#prompt", "Enter")
    playwright.expect(page.locator("#send")).to_have_text("Stop")
    page.keyboard.press("Escape")
    page.locator("article[data-done=true]").wait_for()
    playwright.expect(page.locator("#send")).to_have_text("Send")
    page.focus("#talk")
    reached = [""]
    while reached[-1] != "send" and len(reached) < 20:
        page.keyboard.press("Tab")
        reached.append(page.locator(":focus").evaluate("each => each.id || each.className"))
    controls = ("speculative", "mark", "temperature", "max_tokens", "seed", "reset", "prompt")
    assert set(reached) >= {*controls, "copy", "send"}
    for role, name in (
        ("main", "Conversation"),
        ("complementary", "Figures and settings"),
        ("textbox", "Prompt"),
        ("checkbox", "speculation"),
        ("spinbutton", "temperature"),
        ("spinbutton", "most tokens"),
        ("meter", "the part of the text that drafts wrote"),
        ("button", "New conversation"),
    ):
        assert page.get_by_role(role, name=name).count() == 1, name
