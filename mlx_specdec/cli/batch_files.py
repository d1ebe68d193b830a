"""The files of the batch command: prompts, and a journal of results."""

import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import OutputError, PromptError
from ..system import replacing
from ..version import __version__

STANDARD_STREAM = Path("-")
"""The name of standard input as an input, and of standard output as an output."""
BATCH_FORMAT = "mlx-specdec batch 3"


class PromptLines:
    """The lines of a file of prompts, or of standard input for "-". They are read at once, so that
    replacing the file during a run changes nothing.

    Attributes:
        name: The name of the file, for errors.
        sha256: The digest of the file.
        count: Number of lines.
        prompts: The lines that are not blank, without line breaks, by their number from 1.
        as_json: Whether each line holds a JSON object, according to the file's name or to the first
            line that is not blank.
    Raises:
        PromptError: If the file cannot be read, is not UTF-8 text, or holds no prompts."""

    def __init__(self, file: Path) -> None:
        piped = file == STANDARD_STREAM
        self.name = name = "standard input" if piped else str(file)
        if not piped and file.exists() and not file.is_file():
            raise PromptError(f"{name} is no regular file: save the prompts in one")
        try:
            content = sys.stdin.buffer.read() if piped else file.read_bytes()
        except OSError as problem:
            raise PromptError(f"cannot read the prompts from {name}: {problem.strerror}") from None
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            line = content[: problem.start].count(b"\n") + 1
            raise PromptError(f"{name} is not UTF-8 text (line {line}): prompts must be") from None
        if "\0" in text:
            line = text.partition("\0")[0].count("\n") + 1
            raise PromptError(f"{name} is binary (line {line}): give a text")
        # splitlines() would also cut at U+2028 and form feeds, which prompts may contain.
        lines = text.removesuffix("\n").split("\n")
        self.count = len(lines)
        numbered = enumerate(lines, start=1)
        self.prompts = {at: line.removesuffix("\r") for at, line in numbered if line.strip()}
        if not self.prompts:
            raise PromptError(f"{name} has no prompts: write one a line")
        self.as_json = file.suffix.lower() in (".jsonl", ".ndjson")
        with suppress(ValueError, RecursionError):
            self.as_json |= isinstance(json.loads(next(iter(self.prompts.values()))), dict)


def written(output: Path) -> tuple[Path, Path]:
    """Return the files that a run writes: the output and the journal."""
    return output, output.parent / f"{output.name}.partial"


class Journal(AbstractContextManager["Journal"]):
    """The results of an unfinished run, as a context manager.

    The file has JSON lines: a header, then the results in the order in which they were complete.
    Nothing is written before `begin`.

    Args:
        output: The file for the results in the order of the input, which is written at the end.
        header: Everything that the results depend on: "input", "sha256", and "settings" by flag.
        count: Number of lines of the input.
        overwrite: Replace an existing output, and a journal with another header.
    Attributes:
        partial: The file of the journal.
        records: The results, including errors, by the number of the line.
    Raises:
        OutputError: If the output cannot or may not be written, or another process writes it."""

    def __init__(
        self, output: Path, header: Mapping[str, Any], count: int, *, overwrite: bool = False
    ) -> None:
        self.output, self.partial = written(output)
        self.records: dict[int, dict[str, Any]] = {}
        header = {"format": BATCH_FORMAT, "version": __version__, **header}
        self._header: dict[str, Any] = json.loads(json.dumps(header, default=str))
        self._count = count
        self._stream: FileIO | None = None
        self._end = 0
        if not output.parent.is_dir():
            raise OutputError(f"{output.parent} is no directory: choose another --output")
        for path in (output, self.partial):
            if os.path.lexists(path) and not path.is_file():
                raise OutputError(f"{path} is no regular file: choose another --output")
        try:
            if self.partial.exists():
                self._open()
                self._resume(overwrite)
            if self._end == 0 and output.exists() and not overwrite:
                raise OutputError(
                    f"{output} exists: give --overwrite to replace it, or choose another --output"
                )
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *problem: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def begin(self) -> None:
        """Remove an incomplete line that an earlier run has left, or write the header of a new
        journal."""
        stream = self._stream or self._open()
        with self._writing():
            stream.truncate(self._end)
        if self._end == 0:
            self._write(self._header)

    def append(self, record: dict[str, Any]) -> None:
        """Write the result of line `record["line"]` in one call."""
        self._write(record)
        self.records[record["line"]] = record

    def errors(self) -> list[tuple[int, str]]:
        """Return the line number and the message of each error, in the order of the lines."""
        found = sorted(self.records.items())
        return [(line, record["error"]) for line, record in found if "error" in record]

    def finish(self, *, as_text: bool = False) -> None:
        """Write the output and remove the journal. as_text: Write only the completions, one line
        for each line of the input. The line is empty if there is no completion, and `\\n` stands
        for a line break."""
        records = [self.records.get(line) for line in range(1, self._count + 1)]
        lines = map(_text_line, records) if as_text else map(_line, filter(None, records))
        with self._writing():
            with replacing(self.output, make_parents=False) as stream:
                stream.writelines(lines)
            self.partial.unlink()

    def _open(self) -> FileIO:
        with self._writing():
            self._stream = self.partial.open("a+b", buffering=0)
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"another run is writing {self.output}: wait until it has ended"
            ) from None
        except OSError:
            pass  # a file system without locks
        return self._stream

    def _resume(self, overwrite: bool) -> None:
        """Take over the results of an existing journal. Raises OutputError if its header differs,
        unless the journal holds no results or may be overwritten."""
        with self._writing(), self.partial.open("rb") as lines:
            first = lines.readline()
            if not first:
                return
            header: Any = None
            with suppress(ValueError, RecursionError):
                header = json.loads(first)
            if not isinstance(header, dict) or header.get("format") != BATCH_FORMAT:
                raise OutputError(
                    f"{self.partial} was not left by a run of this program: move it away"
                )
            if difference := self._difference(header):
                if lines.readline() and not overwrite:
                    raise OutputError(
                        f"{self.partial} was left by a run {difference}: run that one again, "
                        "choose another --output, or give --overwrite to start again"
                    )
                return
            self._end = lines.tell()
            # An interrupted run may have written only a part of the last line.
            for line in takewhile(lambda line: line.endswith(b"\n"), lines):
                try:
                    record = json.loads(line)
                    self.records[record["line"]] = record
                except (ValueError, TypeError, KeyError):
                    raise OutputError(
                        f"{self.partial} is damaged behind {len(self.records)} results: delete it"
                    ) from None
                self._end += len(line)

    def _difference(self, header: Mapping[str, Any]) -> str:
        """Return how the run of a journal differs from this run, in a few words; "" if it does
        not."""
        if header.get("sha256") != self._header["sha256"]:
            return f"over another input ({header.get('input')})"
        headers = (header, self._header)
        runs = [{"version": one.get("version"), **one["settings"]} for one in headers]
        for name in runs[0] | runs[1]:
            texts = [json.dumps(run.get(name), ensure_ascii=False) for run in runs]
            if texts[0] != texts[1]:
                before, now = ("unset" if text == "null" else text for text in texts)
                return f"with --{name.replace('_', '-')} {before}, not {now}"
        return ""

    def _write(self, record: Mapping[str, Any]) -> None:
        line = _line(record)
        assert self._stream is not None
        with self._writing():
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

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


def _line(record: Mapping[str, Any]) -> bytes:
    """Return a line of a file. Lone surrogates, as in file names that are not UTF-8, become escapes
    of JSON such as \\udc80."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _text_line(record: Mapping[str, Any] | None) -> bytes:
    text: str = (record or {}).get("text", "")
    return text.replace("\r", "\\r").replace("\n", "\\n").encode() + b"\n"
