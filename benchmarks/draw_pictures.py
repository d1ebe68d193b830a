"""Draw the pictures of README.md, docs/pictures/terminal.svg and page.png, from real runs.

The second one shows a server's page. It needs playwright (the extra `clients`) and Chromium."""

import shutil
import sys
from html import escape
from pathlib import Path

from served import serving

from mlx_specdec import Emission, Options, generate, load, stream_generate

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
PORT = 8131
PREFIX = "translate English to French: "
SENTENCES = (
    "Where is the station?",
    "Where can I buy a ticket for the museum?",
    "She opened the window because it was too hot in the room.",
)
WIDTH, LINE, LEFT = 820, 24, 24
STYLE = """
  .back { fill: #f6f8fa; stroke: #d0d7de }
  text { font: 15px ui-monospace, Menlo, monospace; white-space: pre }
  .word { fill: #1f2328 } .dim { fill: #59636e } .draft { fill: #116329 }
  .draft { text-decoration: underline }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #3d444d } .word { fill: #f0f6fc } .dim { fill: #9198a1 }
    .draft { fill: #56d364 }
  }"""


def spans(emissions: list[Emission]) -> str:
    """Return the text of emissions; the class of each piece says whether it was drafted."""
    pieces = [piece for emission in emissions for piece in emission.pieces if piece.text]
    return "".join(
        f'<tspan class="{"draft" if piece.drafted else "word"}">{escape(piece.text)}</tspan>'
        for piece in pieces
    )


def terminal() -> str:
    """Translate the sentences, and return the picture. Raises RuntimeError if a text differs from
    plain decoding's."""
    pair = load(str(ROOT / "weights/t5-enfr"), str(ROOT / "weights/t5-enfr-draft"))
    lines = []
    for sentence in SENTENCES:
        run = stream_generate(pair, PREFIX + sentence, Options(num_draft=3))
        emissions, stats = list(run), run.result().stats
        if run.result().tokens != generate(pair, PREFIX + sentence, Options(regular=True)).tokens:
            raise RuntimeError(f"speculation changed the text of {sentence!r}")
        counted = f"{stats.accepted} of {stats.drafted} draft tokens accepted"
        lines.append(f'<tspan class="dim">$ mlx-specdec "{escape(sentence)}" --show-drafts</tspan>')
        lines += [spans(emissions), f'<tspan class="dim">{counted}</tspan>', ""]
    lines.append('<tspan class="draft">accepted draft tokens</tspan><tspan class="word">, ')
    lines[-1] += "the target's own; the text is plain decoding's</tspan>"
    rows = "\n".join(
        f'  <text x="{LEFT}" y="{40 + LINE * row}">{line}</text>'
        for row, line in enumerate(lines)
        if line
    )
    height = 40 + LINE * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Three sentences translated; accepted draft tokens are underlined">\n'
        f'<style>{STYLE}\n</style>\n  <rect class="back" x="1" y="1" width="{WIDTH - 2}" '
        f'height="{height - 2}" rx="8"/>\n{rows}\n</svg>\n'
    )


def page(path: Path) -> None:
    """Translate two sentences on the page of a running server, and write a picture of it."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 900, "height": 460})
        view.goto(f"http://127.0.0.1:{PORT}/")
        done = view.locator("article[data-done=true]")
        for sentence in SENTENCES[1:]:
            answer = done.nth(done.count())
            view.fill("#prompt", sentence)
            view.press("#prompt", "Enter")
            answer.wait_for(timeout=60_000)
        view.screenshot(path=str(path))
        browser.close()


if __name__ == "__main__":
    (PICTURES / "terminal.svg").write_text(terminal(), encoding="utf-8")
    with serving([sys.executable, "-m", "mlx_specdec", "serve", "--port", str(PORT)], PORT):
        page(PICTURES / "page.png")
