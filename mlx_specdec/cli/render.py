"""Output of completions and tables to standard output, and of statistics, progress and errors to
standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ..errors import OutputError
from ..system import show_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..engine.known_pairs import KnownPair, Machine
    from ..results import Labels, Result, Step

A_LINE_AFTER = 2.0
"""Seconds without output after which a line says what the program does."""
A_LINE_EVERY = 60
"""Seconds between two lines about progress if there is no terminal."""
NOT_A_TERMINAL = 1000
"""Width, in characters, of tables that are written to a file or a pipe."""
SHOWN_CONTROLS = {
    code: repr(chr(code))[1:-1]
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if code not in (9, 10)
}
"""The escape sequence that is shown for each control character, except for tabs and line breaks."""


def marks(stream: TextIO) -> tuple[str, str]:
    """Return the marks before and after accepted draft tokens. They are brackets, or color and a
    line under the tokens if the stream is a terminal and NO_COLOR is not set (no-color.org)."""
    plain = os.environ.get("TERM") in ("dumb", "unknown") or os.environ.get("NO_COLOR")
    return ("\x1b[32;4m", "\x1b[0m") if stream.isatty() and not plain else ("⟨", "⟩")


def as_json(payload: Mapping[str, Any]) -> str:
    """Return a line of JSON."""
    return json.dumps(payload, ensure_ascii=False) + "\n"


class ReaderGone(Exception):
    """An exception that means that the reader of standard output has closed it."""


def write(stream: TextIO, text: str) -> None:
    """Write text and flush the stream. Raises ReaderGone if the reader has closed it, and
    OutputError if the text cannot be written."""
    # Escape characters that the stream's encoding lacks, and bytes of paths that are no text.
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as problem:
        raise OutputError(f"standard output cannot be written: {problem.strerror}") from None


class TextPrinter:
    """A printer of steps. On a terminal, control characters are escaped. show_drafts: Mark the
    text of accepted draft tokens."""

    def __init__(self, stream: TextIO, show_drafts: bool = False) -> None:
        self._stream = stream
        self._marks = marks(stream) if show_drafts else ("", "")
        self._controls = SHOWN_CONTROLS if stream.isatty() else {}
        self._wrote = ""

    def show(self, step: Step) -> None:
        """Write the text of one step and flush the stream."""
        (before, after), chars = self._marks, step.accepted_chars
        of_drafts, text = step.text[:chars], step.text[chars:].translate(self._controls)
        if of_drafts:
            text = f"{before}{of_drafts.translate(self._controls)}{after}{text}"
        if text:
            write(self._stream, text)
            self._wrote = text

    def finish(self) -> None:
        """End the last line."""
        if not self._wrote.endswith("\n"):
            write(self._stream, "\n")


def legend(stream: TextIO) -> str:
    """Return a line that explains the marks of `show_drafts`."""
    return "accepted draft tokens".join(marks(stream)) + ", the target's own"


def table(*columns: str, header: bool = True) -> Table:
    """Return an empty table. A column is aligned to the right if its name begins with ">"."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    empty = Table(box=SIMPLE_HEAD, show_header=header)
    for name in columns:
        side: Literal["left", "right"] = "right" if name[:1] == ">" else "left"
        empty.add_column(name.removeprefix(">"), justify=side, overflow="fold")
    return empty


def fitted(
    stream: TextIO,
    rows: Sequence[Mapping[str, str]],
    dispensable: Mapping[str, str],
    best: Mapping[str, str] | None = None,
) -> Table:
    """Return a table that fits into the width of a terminal, if enough columns may be left out. The
    last word of a heading gets a line of its own. Columns of numbers are aligned to the right, and
    their cells are not cut.

    Args:
        rows: The cells of each row, by column.
        dispensable: Names of the columns that may be left out, in this order, each with the name of
            the column that then takes its place, or "".
        best: The row that is printed in bold."""
    console = console_for(stream)
    unlimited = console.options.update(width=NOT_A_TERMINAL)
    columns = [name for name in rows[0] if name not in dispensable.values()]
    left = iter(dispensable.items())
    while True:
        number = {name: all(row[name][:1] in "0123456789(" for row in rows) for name in columns}
        heads = ["\n".join(name.rsplit(" ", 1)) for name in columns]
        made = table(*(f">{h}" if number[n] else h for n, h in zip(columns, heads, strict=True)))
        for column, name in zip(made.columns, columns, strict=True):
            column.no_wrap = number[name]
        for row in rows:
            made.add_row(*map(row.__getitem__, columns), style="bold" if row is best else None)
        name, instead = next(left, ("", ""))
        if not name or console.measure(made, options=unlimited).maximum <= console.width:
            return made
        columns = [*filter(None, (instead if column == name else column for column in columns))]


def console_for(stream: TextIO) -> Console:
    """Return a console without markup that is as wide as the terminal. For files and pipes, the
    console is so wide that nothing is wrapped."""
    from rich.console import Console

    width = None if stream.isatty() else NOT_A_TERMINAL
    return Console(file=stream, width=width, highlight=False, markup=False)


def lay_out(stream: TextIO, *shown: object, wrap: bool = True) -> None:
    """Write tables and sentences, one below the other. Raises as `write` does. wrap: Wrap lines
    that are wider than the terminal."""
    console = console_for(stream)
    if not wrap:
        console.width = NOT_A_TERMINAL
    with console.capture() as capture:
        console.print(*shown, sep="\n")
    write(stream, capture.get())


Report = Callable[..., None]
"""A callback for progress: (done, total), or (done, total, label) with a new label of the bar."""


class _Signs:
    """The newest output on standard error by any thread.

    Attributes:
        silent: Whether progress and notes are not shown.
        newest: Time of the newest output.
        bar: The function that changes the label of the visible progress bar, or None."""

    silent = False
    newest = float("-inf")
    bar: Callable[[str], object] | None = None


def silence(wanted: bool) -> None:
    """Show neither progress nor notes from now on, or both again."""
    _Signs.silent = wanted


@contextmanager
def slowly(doing: str) -> Iterator[None]:
    """Print once what the block does, if nothing has been printed for A_LINE_AFTER seconds. If
    there is a progress bar, change its label instead.

    Args:
        doing: The line to print, such as "loading MODEL"."""
    if _Signs.silent:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        began = time.monotonic()
        while (left := max(began, _Signs.newest) + A_LINE_AFTER - time.monotonic()) > 0:
            if done.wait(left):
                return
        show = _Signs.bar or tell
        show(doing)

    threading.Thread(target=watch, name="slowly", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def progress(
    label: str, *, in_bytes: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[Report]:
    """Show a progress bar with the remaining time on standard error, if this is a terminal.
    Otherwise print a line after A_LINE_AFTER seconds, and then one line a minute.

    The bar appears at the first report. It disappears when everything is done, or the block ends.
    Only one bar is visible at a time. in_bytes: Whether counts are bytes, which are shown with
    their speed."""
    if _Signs.silent:
        yield lambda done, total, label=None: None
        return
    if not sys.stderr.isatty():
        yield _lines(label, in_bytes, clock)
        return
    from rich import progress as bar
    from rich.console import Console

    counts: tuple[bar.ProgressColumn, ...] = (bar.MofNCompleteColumn(),)
    if in_bytes:
        counts = (bar.DownloadColumn(), bar.TransferSpeedColumn())
    columns = (bar.TextColumn("{task.description}"), bar.BarColumn(), *counts)
    console = Console(stderr=True)
    bars = bar.Progress(*columns, bar.TimeRemainingColumn(), console=console, transient=True)
    task = bars.add_task(label, total=None)

    def report(done: int, total: int, label: str | None = None) -> None:
        bars.update(task, completed=done, total=total, description=label)
        _Signs.newest = time.monotonic()
        if done < total:
            bars.start()
            _Signs.bar = lambda label: bars.update(task, description=label)
        else:
            hide()

    def hide() -> None:
        bars.stop()
        _Signs.bar = None

    try:
        yield report
    finally:
        hide()


def _lines(name: str, in_bytes: bool, clock: Callable[[], float]) -> Report:
    """Return a callback that prints a line after A_LINE_AFTER seconds, and then one line a
    minute."""
    printed = clock() + A_LINE_AFTER - A_LINE_EVERY
    shown: Callable[[int], str] = show_size if in_bytes else str

    def report(done: int, total: int, label: str | None = None) -> None:
        nonlocal printed
        if done < total and clock() - printed >= A_LINE_EVERY:
            printed = clock()
            tell(f"{label or name}: {shown(done)} of {shown(total)}")

    return report


def error(sentence: str) -> None:
    """Print an error as one line on standard error."""
    tell(f"error: {' '.join(sentence.split())}")


def tell(text: str) -> None:
    """Print lines on standard error. Do nothing if its reader has closed it."""
    _Signs.newest = time.monotonic()
    with contextlib.suppress(BrokenPipeError):
        print(escaped(text), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Do the same as `tell`, but nothing after `silence`, or if there is no text."""
    if text and not _Signs.silent:
        tell(text)


def escaped(text: str) -> str:
    """Escape characters that are not printable, so that names in a checkpoint cannot control the
    terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def summary(result: Result) -> str:
    """Return the statistics of one completion in three lines."""
    stats, labels = result.stats, result.labels
    count, seconds = labels.prompt_tokens - labels.cached_tokens, stats.seconds.prompt
    cached = f" ({labels.cached_tokens} more were known)" if labels.cached_tokens else ""
    made = pace(len(result.tokens), stats.seconds.decoding, stats.tokens_per_second)
    return (
        f"{made}; finish reason: {result.finish_reason}\n"
        f"{drafts(stats.rounds, stats.drafted, stats.accepted, labels)}\n"
        f"prompt: {pace(count, seconds, count / seconds if seconds else None)}{cached}; "
        f"loaded in {stats.seconds.load:.2f} s; "
        f"peak memory {stats.peak_memory_bytes / 1e9:.3f} GB; {stats.device}, BLAS {stats.blas}"
    )


def ending(result: Result, special: Collection[int]) -> str:
    """Return a sentence that explains an empty completion, or "" if the completion is not empty.
    special: Ids of the special tokens that --show-special-tokens prints."""
    if result.text.strip():
        return ""
    if not set(special).isdisjoint(result.tokens):
        return "the model wrote only special tokens: --show-special-tokens prints them"
    if result.finish_reason != "eos":
        return ""
    return "the model ended at once and wrote nothing: a longer prompt may help"


def cut(result: Result, most: int) -> str:
    """Return a sentence if --max-tokens has ended the completion at `most` tokens, otherwise ""."""
    if result.finish_reason != "length" or not 0 < most <= len(result.tokens):
        return ""
    return f"stopped at {most} tokens (--max-tokens)"


def drafts(rounds: int, drafted: int, accepted: int, labels: Labels) -> str:
    """Return a line about draft tokens and accepted tokens."""
    if labels.proposer == "none":
        return "plain decoding"
    rate = f" ({accepted / drafted:.0%})" if drafted else ""
    text = f"{accepted} of {drafted} draft tokens accepted{rate} in "
    text += f"{rounds} rounds, rule {labels.rule}"
    if labels.lossy:
        text += f" (lossy, delta {labels.delta:g})" if labels.delta > 0 else " (lossy)"
    return text


def pace(tokens: int, seconds: float, speed: float | None) -> str:
    """Return a number of tokens, their time, and their speed if it is known, in words."""
    return f"{tokens} tokens in {seconds:.2f} s" + (f", {speed:.1f} tokens/s" if speed else "")


def lengths(reason: str, result: Result) -> str:
    """Return the reason for the draft length, and a line with acceptance rates by position."""
    stats = result.stats
    rates = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    accepted = " ".join(f"{part / count:.2f}" for part, count in rates)
    return f"{reason}\naccepted by position: {accepted}" if accepted else reason


def measured_by(one: KnownPair) -> str:
    """Return the publisher of a pair's figures, and the machine."""
    return " on ".join(filter(None, map((one.source or {}).get, ("by", "machine"))))


def told_speed(one: KnownPair, bits: int, use: str, machine: Machine) -> str:
    """Return a sentence on the speed of a pair on a machine, and on who has measured it."""
    if not (speed := machine.speed * one.speed(bits, use)):
        return "nobody has published what it gains"
    plain = machine.speed * one.speed(bits, "plain")
    gain = told_gain(one, bits, use)
    return f"about {speed:.0f} tokens/s for {use}, {plain:.0f} without drafts; {gain}"


def told_gain(one: KnownPair, bits: int, use: str) -> str:
    """Return what others have measured at exactly these bits, and what contradicts it."""
    if (gain := one.gain(bits, use)) is None or one.source is None:
        return f"nobody has published the gain at {bits} bits"
    source = f"{measured_by(one)}, {one.source['date']}, {one.source['where']}"
    plain = one.plain.get(str(bits))
    speeds = f"{plain:g} to {plain * gain:.1f} tokens/s, " if plain else ""
    contrary = f"; others found {one.contrary}" if one.contrary else ""
    return f"{speeds}{gain:.2f} times plain decoding for {use}, measured by {source}{contrary}"
