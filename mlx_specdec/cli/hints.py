"""Hints for errors about commands of other programs, and about flags that were removed. They are in
hints.toml."""

import tomllib
from difflib import get_close_matches
from pathlib import Path

CERTAIN = 0.85
"""The least similarity to a command of another program at which a word is taken for it, as difflib
counts. The similarity of downlaod and download is 0.875, and listen and list have 0.8."""


def _hints(table: str, separator: str) -> dict[str, str]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    hints: dict[str, str] = tomllib.loads(text)[table]
    return {key: hint for keys, hint in hints.items() for key in keys.split(separator)}


def foreign_command(word: str) -> str:
    """Return what to do instead of a command of another program, or "" for any other word."""
    hints = _hints("commands", " ")
    bare = word.removeprefix("mlx_lm.").removeprefix("llama-")
    return next((hints[near] for near in get_close_matches(bare, hints, 1, CERTAIN)), "")


def removed_flag(command: str | None, option: str) -> str | None:
    """Return the error for a flag that a command does not have, or None if it never had it."""
    hints = _hints("flags", ", ")
    instead = hints.get(f"{command} {option}") or hints.get(option)
    return None if instead is None else f"{option} was removed in release 0.4: {instead}"
