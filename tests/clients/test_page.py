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


def test_an_empty_box_sends_nothing(page: Any, root: str) -> None:
    page.goto(root)
    playwright.expect(page.locator("#about")).to_contain_text("·")
    page.click("#send")
    assert page.locator("article").count() == 0


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
    assert answer.locator("[role=alert]").count() == 1
    assert page.input_value("#prompt") == "Who?"


def test_a_server_that_is_gone_is_reported_with_what_to_do(page: Any, root: str) -> None:
    page.goto(root)
    page.route("**/v1/**", lambda route: route.abort())
    answer = say(page, "Who?")
    assert "Start it again with mlx-specdec serve" in answer.locator(".problem").text_content()
    page.unroute("**/v1/**")
    page.fill("#max_tokens", "5")
    page.press("#prompt", "Enter")
    playwright.expect(page.locator("article[data-done=true]")).to_have_count(2)
    assert page.locator(".problem").count() == 1


def test_the_translator_offers_examples_and_needs_no_prefix(page: Any, translator: str) -> None:
    page.goto(translator)
    playwright.expect(page.locator("#about")).to_contain_text("·")
    assert "translate English to French:" in page.get_attribute("#prompt", "placeholder")
    page.get_by_role("button", name="Where is the station?").click()
    answer = page.locator("article[data-done=true]")
    answer.wait_for()
    text = answer.locator(".text").text_content()
    assert "gare" in text
    # A screen reader says the answer once, as a whole.
    assert page.text_content("[role=status]").endswith(text)
    picture(page, "translator")


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


def test_an_answer_is_copied(page: Any, root: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=root)
    page.goto(root)
    page.fill("#max_tokens", "10")
    answer = say(page, "Who?")
    answer.get_by_role("button", name="Copy the text of").click()
    playwright.expect(answer.locator(".copy")).to_have_text("Copied")
    page.focus("#prompt")
    page.keyboard.press("Control+v")
    assert page.input_value("#prompt") == answer.locator(".text").text_content()


ANSWER = "Use **this**:\n\n```python\nprint('<b>')\n```\n- one\n- two"


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


def test_markdown_is_shown_and_code_is_copied(page: Any, root: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=root)
    page.goto(root)
    answer_with(page, *re.findall(r"(?s).{1,7}", ANSWER))
    answer = say(page, "How?")
    assert answer.locator("strong").inner_text() == "this"
    assert answer.locator(".item").all_inner_texts() == ["one", "two"]
    assert answer.locator(".code").inner_text().strip() == "print('<b>')"
    assert answer.locator("b").count() == 0 and answer.locator(".drafted").count() > 0
    picture(page, "markdown")
    for button, copied in (("Copy the code", "print('<b>')\n"), ("Copy the text of", ANSWER)):
        answer.get_by_role("button", name=button).click()
        playwright.expect(page.locator("[role=status]")).to_have_text("Copied")
        page.fill("#prompt", "")
        page.focus("#prompt")
        page.keyboard.press("Control+v")
        assert page.input_value("#prompt") == copied
    page.reload()
    playwright.expect(page.locator(".code pre")).to_have_text("print('<b>')\n")


def test_an_answer_that_was_cut_says_so(page: Any, root: str) -> None:
    page.goto(root)
    page.fill("#max_tokens", "3")
    assert "The answer was cut" in say(page, "Who?").locator(".notice").inner_text()
    page.reload()
    playwright.expect(page.locator("article .notice")).to_have_count(1)
    page.click("#reset")
    answer_with(page, "Whole.")
    assert say(page, "Who?").locator(".notice").count() == 0


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


def test_a_prompt_that_is_being_read_shows_that_something_goes_on(page: Any, root: str) -> None:
    page.goto(root)
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.fill("#prompt", "Who?")
    page.press("#prompt", "Enter")
    sign = page.locator("article .waiting")
    playwright.expect(sign).to_have_text(re.compile(r"Reading the prompt · \d+ s"))
    picture(page, "reading")
    data = json.dumps({"choices": [{"delta": {"content": "Me."}, "tokens": 1}]})
    held[0].fulfill(content_type="text/event-stream", body=f"data: {data}\n\ndata: [DONE]\n\n")
    page.locator("article[data-done=true]").wait_for()
    playwright.expect(sign).to_have_count(0)


def test_a_page_that_is_opened_while_the_model_is_loaded_waits_for_it(page: Any, root: str) -> None:
    loading = {"error": {"message": "Loading model", "code": "loading"}}
    paths = ["/props", "/health", "/health"]

    def answer(route: Any) -> None:
        if route.request.url.removeprefix(root) in paths:
            paths.remove(route.request.url.removeprefix(root))
            route.fulfill(status=503, json=loading)
        else:
            route.continue_()

    page.route("**/*", answer)
    page.goto(root)
    playwright.expect(page.locator("#about .waiting")).to_contain_text("Loading the model")
    playwright.expect(page.locator("#about")).to_contain_text("draft length")
    assert paths == []


def test_the_panel_opens_and_closes_with_the_width_of_the_window(page: Any, root: str) -> None:
    page.goto(root)
    panel = page.locator("#panel")
    for width, opened in ((1100, True), (500, False), (1100, True)):
        page.set_viewport_size({"width": width, "height": 720})
        playwright.expect(panel.locator("#tokens")).to_be_visible(visible=opened)


def test_the_draft_length_is_named(page: Any, root: str) -> None:
    page.goto(root)
    about = page.locator("#about")
    playwright.expect(about).to_have_text("chat · with a draft model, draft length 2")
    facts = page.request.get(f"{root}/props").json()
    page.route("**/props", lambda route: route.fulfill(json={**facts, "num_draft": "auto"}))
    page.reload()
    playwright.expect(about).to_contain_text("automatic draft length")


def test_a_single_model_is_not_chosen(page: Any, root: str) -> None:
    page.goto(root)
    playwright.expect(page.locator("#about")).to_contain_text("·")
    assert page.is_visible("#model") and not page.is_visible("#models")
    bodies = answer_with(page, "Hello.")
    say(page, "Who?")
    assert "model" not in bodies[0]


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


CONTRAST = """each => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  let behind = each;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") {
    behind = behind.parentElement;
  }
  const both = [getComputedStyle(each).color, getComputedStyle(behind).backgroundColor].map(light);
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
}"""
"""The ratio of WCAG 2.2, success criterion 1.4.3, which wants 4.5."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_everything_in_readable_colors(
    browser: Any, root: str, scheme: Any
) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme)
    page.goto(root)
    playwright.expect(page.locator("#about")).to_contain_text("·")
    page.locator("summary").click()
    page.fill("#max_tokens", "40")
    page.fill("#temperature", "0")
    page.locator("summary").click()
    say(page, "Who?")
    page.locator("summary").click()
    page.fill("#temperature", "-1")
    page.locator("summary").click()
    say(page, "Who?")
    assert page.locator("body").evaluate("each => each.scrollWidth") <= 360
    assert page.is_visible("#prompt") and page.is_visible("#send")
    shown = "#model, #about, #talk span, .problem, .said h3, .copy, summary, #send"
    ratios = page.locator(shown).evaluate_all(f"all => all.map({CONTRAST})")
    assert min(ratios) >= 4.5 and len(ratios) > 8
    picture(page, f"narrow-{scheme}")
    page.close()
