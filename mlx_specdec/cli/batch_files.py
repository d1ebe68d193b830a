"""A file of prompts, line by line, in bounded memory.

Knows bytes and lines; what a line asks for is told by `asked`.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from .. import __version__
from ..errors import OutputError, PromptError

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


FORMAT = "mlx-specdec batch 2"


def header_of(line: bytes, partial: Path) -> Mapping[str, Any]:
    """What the first line of a journal says. Raises OutputError for a line of another file."""
    try:
        header: Any = json.loads(unsealed(line))
    except (ValueError, RecursionError):
        header = None
    known = isinstance(header, dict) and header.get("format") == FORMAT
    if not known or not isinstance(header.get("settings"), dict):
        raise OutputError(f"{partial} was not left by a run of this program: move it away")
    return cast(Mapping[str, Any], header)


def sealed(told: bytes) -> bytes:
    """A line with its checksum; JSON has no tabs of its own."""
    return b"%s\t%08x\n" % (told, zlib.crc32(told))


def unsealed(line: bytes) -> bytes:
    """What was sealed. Raises ValueError for a line that is not as it was written."""
    told = line.rpartition(b"\t")[0]
    if sealed(told) != line:
        raise ValueError("the checksum differs")
    return told


def text_line(line: bytes) -> bytes:
    """A result as a line of text, empty where there is none."""
    text: str = json.loads(line).get("text", "") if line else ""
    return (text.replace("\r", "\\r").replace("\n", "\\n") + "\n").encode("utf-8")


_NONE = -1


class Journal:
    """The results of a run so far. A context manager.

    output: where they go in the end. header: what the results depend on: "input", "sha256",
    "settings" by flag. count: lines of the input. overwrite: replace an output, and a journal of
    another header. done: results that are there; failed: those that are errors.

    Nothing is written before `begin`. Raises OutputError for an output that cannot or may not be
    written, and while another process writes it.
    """

    def __init__(
        self, output: Path, header: Mapping[str, Any], count: int, *, overwrite: bool = False
    ) -> None:
        if not output.name:
            raise OutputError(f"{output} is a directory: name a file in it with --output")
        self.output = output
        self._overwrite = overwrite
        self.partial = output.with_name(f"{output.name}.partial")
        self.done = self.failed = 0
        self._header = json.loads(
            json.dumps({"format": FORMAT, "version": __version__, **header}, default=str)
        )
        self._places = array("q", [_NONE]) * count
        self._stream: FileIO | None = None
        self._end = 0
        self._check_place()
        try:
            if os.path.lexists(self.partial):
                self._open()
                self._read(overwrite)
            self._check_output()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *problem: object) -> None:
        self._close()

    def __contains__(self, line: int) -> bool:
        """Whether the result of this line is there."""
        return self._places[line - 1] != _NONE

    def begin(self) -> None:
        """Make the file, or cut off what a killed process left unfinished at its end."""
        if self._stream is None:
            self._check_output()  # another run may have ended meanwhile
            self._open()
        assert self._stream is not None
        with self._writing():
            self._stream.truncate(self._end)
            self._stream.seek(self._end)
        if self._end == 0:
            self._write(self._header)

    def append(self, record: Mapping[str, Any]) -> None:
        """Keep the result of the line `record["line"]`; it is on its way to the disk afterwards,
        whole."""
        place = self._end
        self._write(record)
        self._note(record, place)

    def finish(self, *, as_text: bool = False) -> None:
        """Write the output and remove the journal. as_text: a line of text for each line of the
        input, empty where there is none, line breaks as `\\n`."""
        made = self.output.with_name(f"{self.output.name}.sorted")
        try:
            with self._writing():
                with made.open("wb") as file, self.partial.open("rb") as journal:
                    for line in self._in_order(journal):
                        file.write(text_line(line) if as_text else line)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(made, self.output)
                self.partial.unlink(missing_ok=True)
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    def errors(self) -> Iterator[tuple[int, str]]:
        """Line and sentence of each result that is an error, in the order of the lines."""
        if self.failed:
            with self.partial.open("rb") as journal:
                for line in self._in_order(journal):
                    record = json.loads(line or b"{}")
                    if "error" in record:
                        yield record["line"], record["error"]

    def _in_order(self, journal: BinaryIO) -> Iterator[bytes]:
        """The result of each line of the input, with its end; nothing where there is none."""
        for place in self._places:
            if place != _NONE:
                journal.seek(place)
            yield unsealed(journal.readline()) + b"\n" if place != _NONE else b""

    def _check_place(self) -> None:
        output = self.output
        if not output.parent.is_dir():
            raise OutputError(
                f"{output.parent} is no directory: make it, or choose another --output"
            )
        for path in (output, self.partial):
            if os.path.lexists(path) and not path.is_file():
                raise OutputError(f"{path} is no regular file: choose another --output")

    def _check_output(self) -> None:
        if self._end == 0 and os.path.lexists(self.output) and not self._overwrite:
            raise OutputError(
                f"{self.output} exists: give --overwrite to replace it, or choose another --output"
            )

    def _open(self) -> None:
        with self._writing():
            stream = FileIO(os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o666), "r+")
            self._stream = stream
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"another run is writing {self.output}: wait until it has ended"
            ) from None
        except OSError:
            pass  # a file system without locks

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _read(self, overwrite: bool) -> None:
        """Take what is there, if it is of this run. Raises OutputError if it is not."""
        with self._writing(), self.partial.open("rb") as lines:
            first = lines.readline()
            if first:
                differs = self._difference(header_of(first, self.partial))
                holds_results = lines.peek(1) != b""
                if differs and holds_results and not overwrite:
                    raise OutputError(
                        f"{self.partial} was left by a run {differs}: run that one again, choose "
                        "another --output, or give --overwrite to begin anew"
                    )
                if not differs:
                    self._end = lines.tell()
                    self._take(lines)

    def _take(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(unsealed(line))
                self._note(record, self._end)
            except (ValueError, TypeError, KeyError, IndexError, RecursionError):
                raise OutputError(
                    f"{self.partial} is damaged behind {self.done} results: delete it"
                ) from None
            self._end += len(line)

    def _difference(self, header: Mapping[str, Any]) -> str:
        """How a journal's run differs from this one, in a few words; nothing where it does not."""
        if header.get("sha256") != self._header["sha256"]:
            return f"over another input ({header.get('input')})"
        if header.get("version") != __version__:
            return f"of version {header.get('version')}, not {__version__}"
        before, now = header.get("settings", {}), self._header["settings"]
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                flag = "--" + name.replace("_", "-")
                return f"with {flag} {_told(before.get(name))}, not {_told(now.get(name))}"
        return ""

    def _note(self, record: Mapping[str, Any], place: int) -> None:
        line = record["line"]
        if line < 1 or line in self:
            raise IndexError(line)
        for name in ("text", "error"):
            if not isinstance(record.get(name, ""), str):
                raise TypeError(name)
        self._places[line - 1] = place
        self.done += 1
        self.failed += "error" in record

    def _write(self, record: Mapping[str, Any]) -> None:
        told = json.dumps(record, ensure_ascii=False)
        # Half a character, as in a file's name that is no UTF-8, becomes JSON's own \udc80.
        line = sealed(told.encode("utf-8", "backslashreplace"))
        with self._writing():
            assert self._stream is not None
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(line)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise OutputError(
                f"{self.output} cannot be written: {reason}: the same command goes on from here "
                "once it can"
            ) from problem


def _told(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if value is not None else "unset"
