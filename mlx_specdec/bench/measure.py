"""Run every method on every prompt, interleaved, and keep what was measured.

Knows the order of runs and nothing of models: methods and the encoding of text are handed in.
Methods take turns prompt by prompt, each time beginning with another one, so that a machine that
gets slower meanwhile slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..contracts import Progress
from ..errors import PromptError
from ..text.prompts import Prompt
from .methods import Method, Runner, Sample


@dataclass(frozen=True)
class Case:
    """One text to generate. prompt: which of the file's prompts; turn: which of its turns."""

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
    count = _Counter(progress, warmup * len(methods) + per_case * len(cases))
    try:
        _warm_up(methods, talk.ids(cases[0]), warmup, count)
        for repeat in range(repeats):
            for index, case in enumerate(cases):
                _measure_case(found, talk, index, case, repeat, count)
                if between is not None:
                    between()
        for index, case in enumerate(cases):
            for method in _turned(timed, index):
                if index not in found.skipped and method.in_parts is not None:
                    sample = method.in_parts(talk.ids(case))
                    found.parts.setdefault(method.name, {})[index] = sample
                count.add()
    except KeyboardInterrupt:
        found.interrupted = True
    if len(found.skipped) == len(cases):
        raise PromptError(f"no prompt can be measured; the first: {found.skipped[0]}")
    return found


def _measure_case(
    found: Measurements, talk: Conversations, index: int, case: Case, repeat: int, count: _Counter
) -> None:
    plain = found.methods[0].name
    for method in _turned(found.methods, index + repeat):
        if index not in found.skipped:
            try:
                sample = method.run(talk.ids(case))
            except PromptError as problem:
                _skip(found, index, str(problem))
            else:
                found.samples[method.name][index, repeat] = sample
                if method.name == plain:
                    talk.answer(case, sample.text)
        count.add()


def _skip(found: Measurements, index: int, reason: str) -> None:
    found.skipped[index] = reason
    for samples in found.samples.values():
        for key in [key for key in samples if key[0] == index]:
            del samples[key]


def _warm_up(methods: Sequence[Method], prompt: Sequence[int], times: int, count: _Counter) -> None:
    for _ in range(times):
        for method in methods:
            _quietly(method.run, prompt)
            count.add()


def _quietly(run: Runner, prompt: Sequence[int]) -> None:
    # A prompt that cannot be taken is told, and skipped, when its turn comes.
    try:
        run(prompt)
    except PromptError:
        return


def _turned(methods: Sequence[Method], by: int) -> Iterator[Method]:
    for place in range(len(methods)):
        yield methods[(place + by) % len(methods)]


class _Counter:
    """Reports how many texts are done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._report()

    def add(self) -> None:
        self._done += 1
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total)
