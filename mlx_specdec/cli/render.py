"""How things look in a terminal: streamed text, statistics, progress bars, one-line errors.

Knows rich and two streams. Text goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ..errors import OutputError

if TYPE_CHECKING:
    from ..checkpoints.convert import Report
    from ..contracts import Progress
    from ..decoding.draft_length import Change
    from ..decoding.ending import Emission, Piece
    from ..decoding.run import Result

GREEN_UNDERLINED = "\x1b[32;4m"
PLAIN = "\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """Colour only on a terminal, and never where NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class ReaderGone(Exception):
    """Whoever read standard output has closed it, and wants no more."""


def write(stream: TextIO, text: str) -> None:
    """Write text at once. Raises ReaderGone, or OutputError where the stream cannot take it."""
    try:
        stream.write(_encodable(text, stream.encoding))
        stream.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as problem:
        raise OutputError(f"standard output cannot be written: {problem.strerror}") from None


class TextPrinter:
    """Writes emissions to a stream as they come.

    show_drafts: mark what accepted draft tokens completed: green and underlined where colour is
    wanted, between ⟨ and ⟩ elsewhere.
    """

    def __init__(self, stream: TextIO, *, show_drafts: bool = False) -> None:
        self._stream = stream
        self._marks = ("", "")
        if show_drafts:
            self._marks = (GREEN_UNDERLINED, PLAIN) if wants_colour(stream) else ("⟨", "⟩")
        self._wrote = ""

    def show(self, emission: Emission) -> None:
        """Write one emission, at once."""
        text = "".join(self._mark(piece) for piece in emission.pieces)
        if text:
            write(self._stream, text)
            self._wrote = text

    def finish(self) -> None:
        """End the line."""
        if not self._wrote.endswith("\n"):
            write(self._stream, "\n")

    def _mark(self, piece: Piece) -> str:
        if not piece.drafted:
            return piece.text
        before, after = self._marks
        return f"{before}{piece.text}{after}"


def legend(stream: TextIO) -> str:
    """One line that explains what `show_drafts` marks."""
    if wants_colour(stream):
        return f"{GREEN_UNDERLINED}accepted draft tokens{PLAIN}, the target's own"
    return "⟨accepted draft tokens⟩, the target's own"


def tell_self_draft(nbytes: int) -> None:
    """What the draft "self" takes beside its target, on standard error."""
    from ..checkpoints.disk.sizes import show

    print(f"drafting with the target's own layers: {show(nbytes)} beside it", file=sys.stderr)


def summary(result: Result) -> str:
    """The statistics of one text in two lines."""
    stats, labels = result.stats, result.labels
    speed = f", {stats.tokens_per_second:.1f} tokens/s" if stats.tokens_per_second else ""
    decoding = stats.seconds.draft + stats.seconds.verify + stats.seconds.other
    first = (
        f"{len(result.tokens)} tokens in {decoding:.2f} s{speed}; ended by {result.finish_reason}"
    )
    prompt = f"prompt {labels.prompt_tokens} tokens in {stats.seconds.prompt:.2f} s"
    loaded = f"loaded in {stats.seconds.load:.2f} s"
    second = "plain decoding"
    if labels.simulated_acceptance is not None:
        first = f"simulated acceptance {labels.simulated_acceptance:g}, no text: {first}"
    if labels.proposer != "none":
        rate = f" ({stats.acceptance_rate:.0%})" if stats.acceptance_rate is not None else ""
        second = f"{stats.accepted} of {stats.drafted} drafted tokens accepted{rate} in "
        second += f"{stats.rounds} rounds, rule {labels.rule}"
        if labels.lossy:
            second += f" (lossy, delta {labels.delta:g})" if labels.delta > 0 else " (lossy)"
    return f"{first}; {prompt}; {loaded}\n{second}; {stats.device}, BLAS {stats.blas}"


def lengths(changes: Sequence[Change], result: Result) -> str:
    """Which numbers of drafted tokens were chosen when, and what they promised."""
    lines = [
        f"from round {change.round} on: {change.length} drafted tokens{_by(change.source)}, "
        + (f"expected {change.speed:.2f} x plain" if change.length else "plain decoding")
        for change in changes
    ]
    drafted = result.stats.drafted_by_position
    if drafted:
        rates = zip(result.stats.accepted_by_position, drafted, strict=True)
        accepted = " ".join(f"{kept / count:.2f}" for kept, count in rates)
        lines.append(f"accepted by position: {accepted}")
    return "\n".join(lines or ["the number of drafted tokens was fixed"])


def _by(source: str) -> str:
    return f" by {source}" if source else ""


def costs(measured: Mapping[int, float]) -> str:
    """What rounds cost, in plain steps."""
    return "\n".join(f"{n:2d} drafted: {cost:.2f} plain steps" for n, cost in measured.items())


def converted(report: Report) -> str:
    """What a conversion did and checked."""
    return report.describe()


@contextmanager
def progress(label: str, *, in_bytes: bool = False) -> Iterator[Progress]:
    """A progress bar with time left on standard error, if that is a terminal; else nothing.

    in_bytes: what is counted are bytes, and the bar says how many and how fast. The bar appears
    with the first call and goes when all is done or the block ends; of two, one shows at a time.
    """
    if not sys.stderr.isatty():
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task(label, total=None)

    def report(done: int, total: int) -> None:
        bars.update(task, completed=done, total=total)
        if done < total:
            bars.start()
        else:
            bars.stop()

    try:
        yield report
    finally:
        bars.stop()


def error(sentence: str) -> None:
    """One line on standard error."""
    tell(f"error: {' '.join(sentence.split())}")


def tell(text: str) -> None:
    """Lines on standard error, if anybody still reads it. What names in a checkpoint hold beside
    printable characters is escaped: they give the terminal no orders."""
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(map(_escaped, text.split("\n"))), file=sys.stderr, flush=True)


def _escaped(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _encodable(text: str, encoding: str | None) -> str:
    """The same, with escapes for what the stream's encoding lacks: bytes of a path that are no
    text in any, and letters where it is not UTF-8."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def _ignore(done: int, total: int) -> None:
    return None
