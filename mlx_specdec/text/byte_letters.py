"""The letters in which byte-level BPE writes bytes (GPT-2's, RoBERTa's)."""

from __future__ import annotations


def _letters() -> list[str]:
    # Printable bytes are themselves, the others U+0100 and on, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


LETTERS = _letters()
"""By byte."""
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}
"""By letter."""
