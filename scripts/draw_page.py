"""Draw docs/pictures/page.png: the page of a server with the shipped translator, after a talk.

Needs playwright (the extra `clients`) and Chromium.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from served import serving

ROOT = Path(__file__).resolve().parents[1]
PORT = 8131
SENTENCES = (
    "Where can I buy a ticket for the museum?",
    "She opened the window because it was too hot in the room.",
)


def draw(port: int, path: Path) -> None:
    """Have the sentences translated on the page, and write a picture of it."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 460})
        page.goto(f"http://127.0.0.1:{port}/")
        done = page.locator("article[data-done=true]")
        for sentence in SENTENCES:
            answer = done.nth(done.count())
            page.fill("#prompt", sentence)
            page.press("#prompt", "Enter")
            answer.wait_for(timeout=60_000)
        page.screenshot(path=str(path))
        browser.close()


if __name__ == "__main__":
    try:
        command = [sys.executable, "-m", "mlx_specdec", "serve", "--port", str(PORT)]
        with serving(command, PORT):
            draw(PORT, ROOT / "docs" / "pictures" / "page.png")
    except ImportError:
        sys.exit("error: install playwright: pip install playwright")
