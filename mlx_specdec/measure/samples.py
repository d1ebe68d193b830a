"""Run every method on every prompt, interleaved, and keep what was measured.

Methods take turns prompt by prompt, each time beginning with another one, so that a machine that
gets slower meanwhile slows all of them alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from ..errors import PromptError
from ..interfaces import Progress
from ..text.prompts import Prompt
from .methods import Method, Sample

T = TypeVar("T")
Key = tuple[int, int]
"""A case and a repeat of it."""


@dataclass(frozen=True)
class Case:
    """One sequence to generate. prompt: which of the file's prompts; turn: which of its turns."""

    prompt: int
    turn: int
    category: str | None


@dataclass
class Measurements:
    """samples: by method; parts: by method, one per case, every round timed in parts. skipped:
    cases that a model cannot take, with the reason. The first method is plain decoding."""

    methods: Sequence[Method]
    cases: Sequence[Case]
    samples: dict[str, dict[Key, Sample]] = field(default_factory=dict)
    parts: dict[str, dict[int, Sample]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def plain(self) -> Mapping[Key, Sample]:
        """What plain decoding made."""
        return self.samples[self.methods[0].name]


def measure(
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    encode: Callable[[str], Sequence[int]],
    *,
    repeats: int = 3,
    warmup: int = 1,
    between: Callable[[], None] = lambda: None,
    progress: Progress = lambda done, total: None,
) -> Measurements:
    """All samples, or those until Ctrl-C.

    methods: the first is plain decoding, which answers earlier turns. warmup: texts per method that
    do not count. between: called whenever all methods have made a text. At the end, every round of
    each text is timed in parts once.
    Raises PromptError where no prompt can be taken.
    """
    cases = [
        Case(number, turn, prompt.category)
        for number, prompt in enumerate(prompts)
        for turn in range(len(prompt.turns))
    ]
    measured = Measurements(methods, cases, {method.name: {} for method in methods})
    answers: dict[tuple[int, int], str] = {}
    timed = [method for method in methods if method.in_parts is not None]
    total = warmup * len(methods) + (repeats * len(methods) + len(timed)) * len(cases)
    counter = count()

    @functools.cache
    def ids(index: int) -> Sequence[int]:
        """A later turn has in front of it, in one message, the earlier turns and the answers that
        plain decoding gave to them."""
        case = cases[index]
        *earlier, last = prompts[case.prompt].turns[: case.turn + 1]
        parts = (
            part
            for turn, text in enumerate(earlier)
            for part in (text, answers.get((case.prompt, turn), ""))
        )
        return encode("\n\n".join([*parts, last]))

    def run(index: int, repeat: int, method: Method) -> None:
        try:
            sample = method.run(ids(index))
        except PromptError as problem:
            measured.skipped[index] = str(problem)
            for samples in measured.samples.values():
                for key in [key for key in samples if key[0] == index]:
                    del samples[key]
            return
        measured.samples[method.name][index, repeat] = sample
        if method is methods[0]:
            answers.setdefault((cases[index].prompt, cases[index].turn), sample.text)

    progress(next(counter), total)
    try:
        for number in range(warmup * len(methods)):
            method = methods[number % len(methods)]
            # A prompt that cannot be taken is told, and skipped, when its turn comes.
            with suppress(PromptError):
                method.run(ids(0))
            progress(next(counter), total)
        for repeat in range(repeats):
            for index in range(len(cases)):
                for method in turned(methods, index + repeat):
                    if index not in measured.skipped:
                        run(index, repeat, method)
                    progress(next(counter), total)
                between()
        for index in range(len(cases)):
            for method in turned(timed, index):
                if index not in measured.skipped and method.in_parts is not None:
                    parts = measured.parts.setdefault(method.name, {})
                    parts[index] = method.in_parts(ids(index))
                progress(next(counter), total)
    except KeyboardInterrupt:
        measured.interrupted = True
    if len(measured.skipped) == len(cases):
        raise PromptError(f"no prompt can be measured; the first: {measured.skipped[0]}")
    return measured


def turned(methods: Sequence[T], by: int) -> list[T]:
    """The same ones in a circle, beginning with another one."""
    first = by % len(methods) if methods else 0
    return [*methods[first:], *methods[:first]]
