"""Decodes the lines of a file of prompts into a journal of results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..decoding.run import Labels
from ..engine.many import Part, Request, stream_many
from ..engine.pair import Pair
from ..errors import OptionError, PromptError, SpecdecError
from ..options import Options
from ..text.chat import Messages
from ..text.prompts import json_object
from .batch_files import LONGEST, Journal, Line, Lines

OWN = ("max_tokens", "seed", "temperature", "top_p", "stop")
"""Settings that a line may have for itself."""
COMMON = frozenset(one.name for one in fields(Options)) - {*OWN}


@dataclass(frozen=True)
class Asked:
    """One prompt of a file. id: the line's own name, where it has one. error: why there is no
    prompt; one sentence."""

    line: int
    prompt: str | Messages
    options: Options
    id: str | int | None = None
    error: str | None = None

    def record(self, **told: Any) -> dict[str, Any]:
        """What is written for this line."""
        named = {} if self.id is None else {"id": self.id}
        return {"line": self.line, **named, **told}


def ask(line: Line, options: Options, *, as_json: bool) -> Asked:
    """What a line asks for; options: of the lines that have none of their own.

    In a line of text `\\n` stands for a line break.
    """
    asked = Asked(line.number, "", options)
    if line.text is None:
        return replace(asked, error=f"the line has more than {LONGEST} bytes: shorten it")
    if not as_json:
        return replace(asked, prompt=line.text.replace("\\n", "\n"))
    try:
        entry = json_object(line.text, "the line")
        asked = replace(asked, id=_id(entry))
        return replace(asked, prompt=_prompt(entry), options=_options(entry, options))
    except SpecdecError as problem:
        return replace(asked, error=str(problem))


def _id(entry: Mapping[str, Any]) -> str | int | None:
    given = entry.get("id")
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    return _text("id", given)


def _prompt(entry: Mapping[str, Any]) -> str | Messages:
    if ("prompt" in entry) == ("messages" in entry):
        raise PromptError('the line must have either "prompt" or "messages"')
    if "prompt" in entry:
        prompt = _text("prompt", entry["prompt"])
        if not prompt.strip():
            raise PromptError("the prompt is empty: give some text")
        return prompt
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages:
        raise PromptError('"messages" must be a list of {"role": ..., "content": ...}')
    return [_message(each) for each in messages]


def _message(given: object) -> dict[str, str]:
    if not isinstance(given, dict) or not given.keys() >= {"role", "content"}:
        raise PromptError('each of "messages" must be {"role": ..., "content": ...}')
    return {name: _text(name, value) for name, value in given.items()}


def _options(entry: Mapping[str, Any], options: Options) -> Options:
    common = sorted(COMMON & entry.keys())
    if common:
        raise OptionError(
            f'"{common[0]}" is one for all lines: leave it out; a line may have {", ".join(OWN)}'
        )
    own = {name: entry[name] for name in OWN if entry.get(name) is not None}
    for name, value in own.items():
        if isinstance(value, bool):
            raise OptionError(f'"{name}" cannot be {str(value).lower()}')
    if "stop" in own:
        stops = own["stop"] if isinstance(own["stop"], list) else [own["stop"]]
        own["stop"] = [_text("stop", each) for each in stops]
    return replace(options, **own)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise PromptError(f'"{name}" must be a string, not {value!r:.80}')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError(f'"{name}" has half a character in it, a lone surrogate') from None
    return value


@dataclass
class Figures:
    """What was done here, earlier runs left out.

    texts: finished. tokens: generated. rounds, drafted, accepted: of finished texts. labels: of the
    newest of these.
    """

    texts: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    labels: Labels | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """None before the first token."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


class BatchRun:
    """Iterate to decode the lines that the journal lacks; each step is a little work.

    batch_size, memory_budget: None leaves it to many.stream_many. strict: raise PromptError for the
    first line that cannot become a text; otherwise its result says why. many: how the lines are
    decoded. Raises as many.stream_many and Journal do.
    """

    def __init__(
        self,
        pair: Pair,
        lines: Lines,
        journal: Journal,
        options: Options,
        *,
        batch_size: int | None = None,
        memory_budget: int | None = None,
        strict: bool = False,
    ) -> None:
        self.figures = Figures()
        self._lines = lines
        self._journal = journal
        self._options = options
        self._strict = strict
        self._asked: dict[int, Asked] = {}
        self.many = stream_many(
            pair,
            self._requests(),
            options,
            batch_size="auto" if batch_size is None else batch_size,
            memory_budget=memory_budget,
        )

    def __iter__(self) -> Iterator[None]:
        """Ends when every line has a result."""
        journal, figures = self._journal, self.figures
        if self._strict:
            for line, error in journal.errors():
                raise self._refusal(line, error)
        journal.begin()
        started = time.perf_counter()
        for part in self.many:
            figures.tokens += len(part.emission.tokens)
            if part.last:
                self._keep(part)
            figures.seconds = time.perf_counter() - started
            yield

    def _requests(self) -> Iterator[Request]:
        """Read as far ahead as decoding asks for."""
        number = 0
        for line in self._lines:
            if line.number in self._journal:
                continue
            asked = ask(line, self._options, as_json=self._lines.as_json)
            if asked.error is not None:
                self._fail(asked, asked.error)
                continue
            self._asked[number] = asked
            number += 1
            yield Request(asked.prompt, asked.options)

    def _keep(self, part: Part) -> None:
        asked, result = self._asked.pop(part.number), part.result
        if result is None:
            self._fail(asked, part.error or "")
            return
        # Only what depends on nothing but prompt, target, settings and seed: neither times nor
        # what was drafted.
        self._journal.append(
            asked.record(
                text=result.text,
                finish_reason=result.finish_reason,
                prompt_tokens=result.labels.prompt_tokens,
                generated_tokens=len(result.tokens),
                seed=result.labels.seed,
            )
        )
        self.figures.texts += 1
        self.figures.rounds += result.stats.rounds
        self.figures.drafted += result.stats.drafted
        self.figures.accepted += result.stats.accepted
        self.figures.labels = result.labels

    def _fail(self, asked: Asked, error: str) -> None:
        if self._strict:
            raise self._refusal(asked.line, error)
        self._journal.append(asked.record(error=error))

    def _refusal(self, line: int, error: str) -> PromptError:
        return PromptError(f"line {line} of {self._lines.file}: {error}")
