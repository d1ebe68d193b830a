"""Draw docs/pictures/terminal.svg: a run of the shipped translator, accepted drafts marked."""

from __future__ import annotations

from html import escape
from pathlib import Path

from mlx_specdec import Emission, Options, generate, load, stream_generate

ROOT = Path(__file__).resolve().parents[1]
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
    """Return the text of emissions, each piece in the class of where it is from."""
    pieces = [piece for emission in emissions for piece in emission.pieces if piece.text]
    return "".join(
        f'<tspan class="{"draft" if piece.drafted else "word"}">{escape(piece.text)}</tspan>'
        for piece in pieces
    )


def draw() -> str:
    """Translate the sentences, and return the picture. Raises RuntimeError where a text differs
    from plain decoding's."""
    pair = load(str(ROOT / "weights/t5-enfr"), str(ROOT / "weights/t5-enfr-draft"))
    options = Options(num_draft=3)
    lines = []
    for sentence in SENTENCES:
        run = stream_generate(pair, PREFIX + sentence, options)
        emissions = list(run)
        stats = run.result().stats
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


if __name__ == "__main__":
    place = ROOT / "docs/pictures/terminal.svg"
    place.write_text(draw(), encoding="utf-8")
    print(place)
