"""From the lines of a file to the results in its journal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..decoding.run import Labels
from ..errors import PromptError
from ..many import Part, Request, stream_many
from ..options import Options
from ..pair import Pair
from .asked import Asked, ask
from .journal import Journal
from .lines import Lines


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
