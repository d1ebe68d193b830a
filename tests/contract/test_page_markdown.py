"""The Markdown of the page, in node with a few lines in place of a browser's elements."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from .several import Several

ELEMENTS = """
class Element {
  constructor(tag) { Object.assign(this, { tag, className: "", childNodes: [], own: "" }); }
  set textContent(text) { this.own = text; }
  get textContent() { return this.own + this.childNodes.map((each) => each.textContent).join(""); }
  get lastChild() { return this.childNodes.at(-1); }
  append(child) { this.childNodes.push(child); child.parent = this; }
  remove() { this.parent.childNodes.splice(this.parent.childNodes.indexOf(this), 1); }
  setAttribute(name, value) { this[name] = value; }
  addEventListener() {}
  toJSON() {
    const { tag, className, href, own, childNodes } = this;
    return { tag, class: className, href, text: own, children: childNodes };
  }
}
globalThis.document = { createElement: (tag) => new Element(tag) };
"""
ASK = """
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map((pieces) => {
  const element = new Element("div"), shown = new Markdown(element);
  for (const [text, kind] of pieces) {
    shown.write(text, kind);
    shown.draw();
  }
  return { element, text: element.textContent };
})));
"""
ALLOWED = {"div", "strong", "em", "code", "pre", "a", "span", "button"}
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def page(several: Several) -> str:
    """The page as the server sends it."""
    return several.server.get("/").body.decode()


@pytest.fixture(scope="module")
def render(page: str) -> Render:
    """A function that renders texts in pieces, and returns each element and its text."""
    return lambda *cases: rendered(page, *cases)


def rendered(page: str, *cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    [markdown] = re.findall(r"// Markdown begins.*?// Markdown ends", page, re.DOTALL)
    [add] = re.findall(r"^function add\(.*?^}", page, re.DOTALL | re.MULTILINE)
    script = "\n".join((ELEMENTS, add, markdown, ASK))
    done = subprocess.run(
        [str(NODE), "-e", script], input=json.dumps(cases), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    elements: list[dict[str, Any]] = json.loads(done.stdout)
    return elements


def every(element: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an element and all elements in it."""
    return [element, *(one for child in element["children"] for one in every(child))]


def shown(element: dict[str, Any]) -> str:
    """Return what a reader sees of an element: its text without hidden marks."""
    if element["class"] == "mark":
        return ""
    return element["text"] + "".join(map(shown, element["children"]))


TEXT = """# A *title*

Some **strong** and `code`, a [link](https://a.b/c?d=e), 2 * 3 * 4 and snake_case_name.
A second line.
- one
- two _em_
3. third
> said

```python
def f(x):
    return "**not strong**" # `no`
```
---
| a | b |
| 1 | 2 |
"""


def test_blocks_and_marks_become_elements(render: Render) -> None:
    [done] = render([(TEXT, "")])
    blocks = [one for one in done["element"]["children"] if one["class"] != "empty"]
    kinds = ["heading", "paragraph", "item", "item", "numbered", "quote", "code", "rule", "table"]
    assert [one["class"] for one in blocks] == kinds
    heading, paragraph, one, two, third, quote, code, rule, table = map(shown, blocks)
    assert heading == "A title" and (one, two, third) == ("one", "two em", "3. third")
    first, second = paragraph.split("\n")
    assert first == "Some strong and code, a link, 2 * 3 * 4 and snake_case_name."
    assert second == "A second line." and (quote, rule) == ("said", "")
    assert code == 'def f(x):\n    return "**not strong**" # `no`\n'
    assert table == "| a | b |\n| 1 | 2 |"
    found = {(each["tag"], shown(each)) for each in every(done["element"])}
    marks = {("strong", "strong"), ("code", "code"), ("a", "link"), ("em", "em"), ("em", "title")}
    assert marks <= found and ("button", "") in found
    [link] = [each["href"] for each in every(done["element"]) if each["tag"] == "a"]
    assert link == "https://a.b/c?d=e"


def test_nothing_is_read_as_html_and_no_link_runs_a_script(render: Render, page: str) -> None:
    text = (
        "<script>alert(1)</script> <img src=x onerror=alert(1)> **<b>x</b>**\n"
        '[a](javascript:alert(1)) [b](data:text/html,x) [c](https://ok.example/"onclick=) '
        "```<i>\n</code><script>\n```"
    )
    [done] = render([(text, "")])
    elements = every(done["element"])
    assert {one["tag"] for one in elements} <= ALLOWED
    assert done["text"] == text
    assert [one["href"] for one in elements if one["tag"] == "a"] == []
    # Elements are only made, and never parsed from a text.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser", page)


def test_any_text_in_any_pieces_keeps_its_characters_and_its_marks(render: Render) -> None:
    rng = random.Random(7)
    signs = [
        "*",
        "**",
        "_",
        "`",
        "```",
        "~~~",
        "\n",
        "\n\n",
        "# ",
        "- ",
        "1. ",
        "> ",
        "|",
        "[a](",
        ")",
    ]
    signs += ["https://a.b", " ", "word", "é😀", "<b>", "---", "  "]
    cases = []
    for _ in range(300):
        text = "".join(rng.choice(signs) for _ in range(rng.randrange(1, 40)))
        cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randrange(6))))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        kinds = [rng.choice(["", "drafted"]) for _ in parts]
        cases += [list(zip(parts, kinds, strict=True)), [(text, "")]]
    results = render(*cases)
    for case, done in zip(cases, results, strict=True):
        text = "".join(part for part, _ in case)
        assert done["text"] == text, case
        drafted = [one for one in every(done["element"]) if one["class"] == "drafted"]
        marked = sum(len(part) for part, kind in case if kind == "drafted")
        assert sum(len(one["text"]) for one in drafted) == marked
    for pieces, whole in zip(results[::2], results[1::2], strict=True):
        # A text that came in pieces is shown as it would be at once.
        assert shown(pieces["element"]) == shown(whole["element"])


def test_a_long_text_of_marks_ends(render: Render) -> None:
    hostile = ["*" * 3000, "_a " * 3000, "`" * 3000, "[" * 3000 + "](" * 500, "**a" * 2000]
    results = render(*([(text, "")] for text in hostile))
    assert [done["text"] for done in results] == hostile
