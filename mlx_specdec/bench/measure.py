"""Run every method on every prompt, interleaved, and keep what was measured.

Methods take turns prompt by prompt, each time beginning with another one, so that a machine that
gets slower meanwhile slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from ..contracts import Progress
from ..errors import PromptError
from ..text.prompts import Prompt
from .methods import Method, Sample


@dataclass(frozen=True)
class Case:
    """One sequence to generate. prompt: which of the file's prompts; turn: which of its turns."""

    prompt: int
    turn: int
    category: str | None


@dataclass
class Measurements:
    """samples: by method, then by (case, repeat); parts: by method, one per case, every round timed
    in parts. skipped: cases that a model cannot take, with the reason."""

    methods: list[Method]
    cases: list[Case]
    samples: dict[str, dict[tuple[int, int], Sample]] = field(default_factory=dict)
    parts: dict[str, dict[int, Sample]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False


class Conversations:
    """Token ids of each case's prompt. A later turn has in front of it, in one message, the earlier
    turns and the answers that plain decoding gave to them."""

    def __init__(self, prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]]) -> None:
        self._prompts = prompts
        self._encode = encode
        self._ids: dict[Case, Sequence[int]] = {}
        self._answers: dict[tuple[int, int], str] = {}

    def cases(self) -> list[Case]:
        """One for every turn of every prompt."""
        return [
            Case(number, turn, prompt.category)
            for number, prompt in enumerate(self._prompts)
            for turn in range(len(prompt.turns))
        ]

    def ids(self, case: Case) -> Sequence[int]:
        """What to feed, encoded once. Earlier turns must have been answered."""
        if case not in self._ids:
            self._ids[case] = self._encode(self._text(case))
        return self._ids[case]

    def answer(self, case: Case, text: str) -> None:
        """Plain decoding's text; the first one counts."""
        self._answers.setdefault((case.prompt, case.turn), text)

    def _text(self, case: Case) -> str:
        turns = self._prompts[case.prompt].turns
        earlier = [
            part
            for turn in range(case.turn)
            for part in (turns[turn], self._answers.get((case.prompt, turn), ""))
        ]
        return "\n\n".join([*earlier, turns[case.turn]])


def measure(
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    encode: Callable[[str], Sequence[int]],
    *,
    repeats: int = 3,
    warmup: int = 1,
    parts: bool = True,
    between: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> Measurements:
    """All samples, or those until Ctrl-C.

    methods: the first is plain decoding, which answers earlier turns. warmup: texts per method that
    do not count. parts: at the end, once more with every round timed in parts. between: called
    whenever all methods have made a text.
    Raises PromptError where no prompt can be taken.
    """
    talk = Conversations(prompts, encode)
    cases = talk.cases()
    found = Measurements(list(methods), cases, {method.name: {} for method in methods})
    timed = [method for method in methods if parts and method.in_parts is not None]
    per_case = repeats * len(methods) + len(timed)
    total = warmup * len(methods) + per_case * len(cases)
    counter = count()

    def done() -> None:
        at = next(counter)
        if progress is not None:
            progress(at, total)

    done()
    try:
        for method in list(methods) * warmup:
            # A prompt that cannot be taken is told, and skipped, when its turn comes.
            with suppress(PromptError):
                method.run(talk.ids(cases[0]))
            done()
        for repeat in range(repeats):
            for index, case in enumerate(cases):
                for method in _turned(methods, index + repeat):
                    _measure(found, talk, index, case, repeat, method)
                    done()
                if between is not None:
                    between()
        for index, case in enumerate(cases):
            for method in _turned(timed, index):
                if index not in found.skipped and method.in_parts is not None:
                    sample = method.in_parts(talk.ids(case))
                    found.parts.setdefault(method.name, {})[index] = sample
                done()
    except KeyboardInterrupt:
        found.interrupted = True
    if len(found.skipped) == len(cases):
        raise PromptError(f"no prompt can be measured; the first: {found.skipped[0]}")
    return found


def _measure(
    found: Measurements, talk: Conversations, index: int, case: Case, repeat: int, method: Method
) -> None:
    if index in found.skipped:
        return
    try:
        sample = method.run(talk.ids(case))
    except PromptError as problem:
        found.skipped[index] = str(problem)
        for name, samples in found.samples.items():
            found.samples[name] = {key: one for key, one in samples.items() if key[0] != index}
        return
    found.samples[method.name][index, repeat] = sample
    if method is found.methods[0]:
        talk.answer(case, sample.text)


def _turned(methods: Sequence[Method], by: int) -> list[Method]:
    first = by % len(methods) if methods else 0
    return [*methods[first:], *methods[:first]]
