"""How far a training is: two bars on standard error, and a line after every epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

F = TypeVar("F")


class Watcher(Generic[F]):
    """Bars where there is a terminal. line: of an epoch's number and what was measured after it."""

    def __init__(self, bars: Bars | None, line: Callable[[int, F], str]) -> None:
        self._bars = bars
        self._line = line
        if bars is not None:
            self._texts = bars.add_task("reading texts", total=None, visible=False)
            self._steps = bars.add_task("training", total=None, visible=False)

    def collected(self, done: int, total: int) -> None:
        """Texts."""
        if self._bars is not None:
            self._bars.update(self._texts, completed=done, total=total, visible=done < total)

    def stepped(self, done: int, total: int, loss: float) -> None:
        """Steps, with the loss of the last one."""
        if self._bars is not None:
            self._bars.update(
                self._steps,
                description=f"training, loss {loss:.3f}",
                completed=done,
                total=total,
                visible=True,
            )

    def measured(self, epoch: int, figures: F) -> None:
        """An epoch's end."""
        line = self._line(epoch, figures)
        if self._bars is not None:
            self._bars.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr)


@contextmanager
def watcher(line: Callable[[int, F], str]) -> Iterator[Watcher[F]]:
    """Bars are gone when the block ends; the lines stay. An interruption is told how to go on."""
    try:
        with _bars() as bars:
            yield Watcher(bars, line)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise


@contextmanager
def _bars() -> Iterator[Bars | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield bars
