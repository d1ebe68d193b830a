"""Draw the pictures in docs/pictures from real runs:

    python benchmarks/draw_pictures.py [terminal chat page]

terminal.svg shows translations, and chat.svg a chat with SmolLM2, which
`./scripts/real_models.sh smollm2` downloads. page.png shows another one on a server's page. It
needs playwright (the extra `clients`) and Chromium."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from html import escape
from itertools import groupby, starmap
from operator import itemgetter
from pathlib import Path

from served import serving

from mlx_specdec import Options, Result, Step, generate, load, stream_generate, system
from mlx_specdec.engine.pair import Pair

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
PORT = 8131
PREFIX = "translate English to French: "
SENTENCES = (
    "Where is the station?",
    "Where can I buy a ticket for the museum?",
    "She opened the window because it was too hot in the room.",
)
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
MESSAGES = (
    "Correct the spelling: The weather was beautifull, so we walked along the river "
    "to the old bridge and had a picnic in the shade of the trees.",
    "Please write it again.",
)
TASKS = (
    "Write a Python function that adds two numbers. Reply with the code only.",
    "Now one that multiplies two numbers.",
    "Now one that subtracts two numbers.",
)
SPECULATED = 6
WIDTH, LINE, LEFT = 820, 24, 24
COLUMNS = 84
"""Characters of a line."""
STYLE = """
  .back { fill: #f6f8fa; stroke: #d0d7de }
  text { font: 15px ui-monospace, Menlo, monospace; white-space: pre }
  .word { fill: #1f2328 } .dim { fill: #59636e } .draft { fill: #116329 }
  .draft { text-decoration: underline }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #3d444d } .word { fill: #f0f6fc } .dim { fill: #9198a1 }
    .draft { fill: #56d364 }
  }"""


def span(kind: str, text: str) -> str:
    """Return a text in the colour of its class."""
    return f'<tspan class="{kind}">{escape(text, quote=False)}</tspan>'


def answer(steps: list[Step]) -> list[str]:
    """Return the lines of an answer. The class of each piece says whether it was drafted."""
    pieces = [
        (kind, text)
        for step in steps
        for kind, text in (
            ("draft", step.text[: step.accepted_chars]),
            ("word", step.text[step.accepted_chars :]),
        )
    ]
    lines: list[list[tuple[str, str]]] = [[]]
    column = 0
    for kind, text in pieces:
        for word in re.findall(r" *[^ ]+| +", text):
            if word[0] == " " and column + len(word) > COLUMNS:
                lines.append([])
                word, column = word.strip(), 0
            lines[-1].append((kind, word))
            column += len(word)
    return ["".join(starmap(span, _joined(line))) for line in lines]


def _joined(words: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join neighbours of the same class."""
    for kind, group in groupby(words, key=itemgetter(0)):
        yield kind, "".join(word for _, word in group)


def decoded(pair: Pair, prompt: str | list[int], options: Options) -> tuple[list[str], Result]:
    """Return the lines of an answer and of its count of draft tokens, and the result. Raises
    RuntimeError if the text differs from plain decoding's."""
    run = stream_generate(pair, prompt, options)
    steps, result = list(run), run.result()
    if result.tokens != generate(pair, prompt, Options(regular=True)).tokens:
        raise RuntimeError(f"speculation changed the text of {prompt!r}")
    counted = f"{result.stats.accepted} of {result.stats.drafted} draft tokens accepted"
    return [*answer(steps), span("dim", counted), ""], result


def picture(lines: list[str], label: str) -> str:
    """Return a terminal with these lines and with an explanation of the colours."""
    meaning = span("word", ", the target's own; the text is plain decoding's")
    lines = [*lines, span("draft", "accepted draft tokens") + meaning]
    rows = "\n".join(
        f'  <text x="{LEFT}" y="{40 + LINE * row}">{line}</text>'
        for row, line in enumerate(lines)
        if line
    )
    height = 40 + LINE * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{label}; accepted draft tokens are underlined">\n'
        f'<style>{STYLE}\n</style>\n  <rect class="back" x="1" y="1" width="{WIDTH - 2}" '
        f'height="{height - 2}" rx="8"/>\n{rows}\n</svg>\n'
    )


def terminal() -> str:
    """Translate the sentences, and return the picture."""
    pair = load(str(ROOT / "weights/t5-enfr"), str(ROOT / "weights/t5-enfr-draft"))
    lines = []
    for sentence in SENTENCES:
        lines.append(span("dim", f'$ mlx-specdec "{sentence}" --show-drafts'))
        lines += decoded(pair, PREFIX + sentence, Options(num_draft=3))[0]
    return picture(lines, "Three sentences translated")


def chat() -> str:
    """Ask a published model twice, and return the picture."""
    pair = load(system.cache_directory("real-models") / SMOLLM2)
    options = Options(num_draft=SPECULATED, proposer="ngram")
    lines = [f"$ mlx-specdec chat --model {SMOLLM2} --num-draft {SPECULATED} --show-drafts"]
    lines = [span("dim", line) for line in lines]
    messages: list[dict[str, str]] = []
    for message in MESSAGES:
        messages.append({"role": "user", "content": message})
        lines += [span("dim", line) for line in textwrap.wrap(f"> {message}", COLUMNS)]
        added, result = decoded(pair, pair.tokenizer.apply_chat(messages), options)
        lines += added
        messages.append({"role": "assistant", "content": result.text})
    return picture(lines, "A chat with SmolLM2-135M")


def page(path: Path) -> None:
    """Chat on the page of a running server, and write a picture of it."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1280, "height": 800})
        view.goto(f"http://127.0.0.1:{PORT}/")
        done = view.locator("article[data-done=true]")
        for task in TASKS:
            answer = done.nth(done.count())
            view.fill("#prompt", task)
            view.press("#prompt", "Enter")
            answer.wait_for(timeout=60_000)
        view.screenshot(path=str(path))
        browser.close()


def served_page() -> None:
    """Start a server, and draw its page."""
    model = str(system.cache_directory("real-models") / SMOLLM2)
    command = [sys.executable, "-m", "mlx_specdec", "serve", "--model", model]
    with serving([*command, "--num-draft", str(SPECULATED), "--port", str(PORT)], PORT):
        page(PICTURES / "page.png")


def main() -> None:
    wanted = sys.argv[1:] or ["terminal", "chat", "page"]
    for name, draw in (("terminal", terminal), ("chat", chat)):
        if name in wanted:
            (PICTURES / f"{name}.svg").write_text(draw(), encoding="utf-8")
    if "page" in wanted:
        served_page()


if __name__ == "__main__":
    main()
