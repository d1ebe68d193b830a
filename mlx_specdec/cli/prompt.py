"""Where the prompt of a command comes from: an argument, a flag, a file or standard input."""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path

from ..errors import OptionError, PromptError
from . import render

PIPE_SECONDS = 5.0
"""How long the first byte of a pipe that nobody asked for may take."""
LONGEST = 1 << 25
"""Characters of a prompt: more than any model takes; a device has no end."""


def read_prompt(words: str | None, prompt: str | None, file: Path | None) -> str | None:
    """The prompt, or None where there is none. Raises OptionError, PromptError."""
    given = [source for source in (words, prompt, file) if source is not None]
    if len(given) > 1:
        raise OptionError("more than one prompt: give an argument, --prompt or --prompt-file")
    source: str | Path | None = given[0] if given else _piped()
    try:
        text: str | None
        if isinstance(source, Path):
            with source.open(encoding="utf-8") as stream:
                text = stream.read(LONGEST + 1)
        else:
            text = sys.stdin.read(LONGEST + 1) if source == "-" else source
        if text is not None:
            if len(text) > LONGEST:
                raise PromptError(f"the prompt has more than {LONGEST} characters: shorten it")
            text.encode("utf-8")  # Bytes that are no text come as lone surrogates.
    except OSError as problem:
        place = "standard input" if file is None else file
        raise PromptError(f"cannot read the prompt from {place}: {problem.strerror}") from None
    except UnicodeError:
        raise PromptError("the prompt is not UTF-8 text") from None
    if not given and text is not None and not text.strip():
        return None
    return text


def _piped() -> str | None:
    """The name - of standard input where that is a file, or a pipe that is not silent and open:
    programs that start others often leave such a pipe there."""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(mode):
        return "-"
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return None
    if select.select([number], [], [], PIPE_SECONDS)[0]:
        return "-"
    render.tell("nothing came on standard input, which is left alone: - waits for it")
    return None
