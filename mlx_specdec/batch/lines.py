"""A file of prompts, line by line, in bounded memory.

Knows bytes and lines; what a line asks for is told by `asked`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import PromptError

LONGEST = 1 << 20
"""Bytes of a line that is still read."""
JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Line:
    """number: counted from 1. text: without its end; None where it is longer than LONGEST."""

    number: int
    text: str | None


class Lines:
    """The lines of a file. A context manager: the file stays open, so that another one that takes
    its name meanwhile changes nothing.

    sha256: of the file. count: its lines, prompts: those that are not blank. as_json: whether each
    holds a JSON object: the file's name says so, or the first line that is not blank is one.
    Raises PromptError for what cannot be read, is no UTF-8 text, or holds nothing.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.count = self.prompts = 0
        self.as_json = file.suffix.lower() in JSON_LINES
        if file.exists() and not file.is_file():
            raise PromptError(f"{file} is no regular file: save the prompts in one")
        try:
            self._stream = file.open("rb")
        except OSError as problem:
            raise self._unreadable(problem) from None
        try:
            self.sha256 = self._survey()
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *problem: object) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[Line]:
        """Those that are not blank, from the first one on."""
        self._stream.seek(0)
        for number in range(1, self.count + 1):
            part = self._part()
            if _is_cut(part):
                while _is_cut(part):
                    part = self._part()
                yield Line(number, None)
                continue
            try:
                text = part.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise PromptError(f"{self.file} changed while it was read: run again") from None
            if text.strip():
                yield Line(number, text.removesuffix("\n").removesuffix("\r"))

    def _survey(self) -> str:
        """Reads everything once; the digest."""
        digest = hashlib.sha256()
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        begins = True
        while part := self._part():
            self.count += begins
            digest.update(part)
            try:
                text = decoder.decode(part)
            except UnicodeDecodeError:
                raise self._no_text() from None
            if "\0" in text:
                raise PromptError(f"{self.file} is binary (line {self.count}): give a text")
            if begins and (_is_cut(part) or text.strip()):
                self.prompts += 1
                if self.prompts == 1:
                    self.as_json = self.as_json or _is_object(text, cut=_is_cut(part))
            begins = part.endswith(b"\n")
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise self._no_text() from None
        if not self.prompts:
            raise PromptError(f"{self.file} has no prompts: write one a line")
        return digest.hexdigest()

    def _part(self) -> bytes:
        """A line with its end, or the next LONGEST bytes of a longer one."""
        try:
            return self._stream.readline(LONGEST)
        except OSError as problem:
            raise self._unreadable(problem) from None

    def _unreadable(self, problem: OSError) -> PromptError:
        return PromptError(f"cannot read the prompts from {self.file}: {problem.strerror}")

    def _no_text(self) -> PromptError:
        return PromptError(f"{self.file} is not UTF-8 text (line {self.count}): prompts must be")


def _is_cut(part: bytes) -> bool:
    return len(part) == LONGEST and not part.endswith(b"\n")


def _is_object(text: str, *, cut: bool) -> bool:
    if cut:
        return text.lstrip().startswith("{")
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
