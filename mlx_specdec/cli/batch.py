"""The batch command: generate a completion for each prompt of a file."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..checkpoints.source import temporary_directory
from ..core.options import Options
from ..errors import OptionError, PromptError, SpecdecError
from ..system import check_not_read, json_object
from . import interrupts, render
from .batch_files import STANDARD_STREAM, Journal, PromptLines, written
from .flags import REQUIRED, Constraints, Flags, SpecialTokens, command, flag
from .loading import MemoryFlags, TextFlags, count_or_auto, load_drafting

if TYPE_CHECKING:
    from ..core.row import Request
    from ..engine.scheduler import Scheduler
    from ..results import Labels, Step
    from ..text.chat import Messages

PER_LINE = ("max_tokens", "seed", "temperature", "top_p", "stop")
"""Settings that a line may override."""
NO_MATTER = ("distributed", "memory_budget", "no_cost_cache")
"""Flags that do not change any completion."""
COMMON = frozenset(setting.name for setting in fields(Options)) - {*PER_LINE}
"""Settings that are the same for all lines."""


class Files(Flags, panel="Batch"):
    input: Path = flag(
        "The file of prompts, or - for standard input. Each line is a prompt. If the name ends in "
        ".jsonl or the first line is a JSON object, each line is an object. It needs a prompt "
        "or messages. It may have id, max_tokens, seed, temperature, top_p and stop.",
        REQUIRED,
        argument=True,
        metavar="INPUT",
    )
    output: Path = flag(
        "The file to write, as JSON lines in the order of the input; - is standard output. Only a "
        "run with a file can be resumed.",
        REQUIRED,
        "-o",
        metavar="FILE",
    )
    batch_size: str = flag(
        "The number of sequences that are decoded together. With auto, it is the number with the "
        "most tokens per second.",
        "auto",
        metavar="N|auto",
    )
    text: bool = flag("Write only the completions, one a line, with \\n for line breaks.")
    strict: bool = flag("Stop at the first line that fails, instead of writing its error.")
    overwrite: bool = flag(
        "Replace an existing output, and the results of an unfinished run with other settings."
    )
    quiet: bool = flag("Print no statistics, no progress and no notes.")


class Made(SpecialTokens, Constraints, MemoryFlags, TextFlags):
    """Flags that change the completions."""


@command(
    "mlx-specdec batch sentences.txt --output translations.jsonl",
    "mlx-specdec batch a.txt -o b.txt --model weights/py-llama --batch-size 8",
)
def batch(files: Files, flags: Made) -> None:
    """Generate a completion for each line of a file, many at once.

    Completions are the same as if each prompt were decoded alone. The same command resumes an
    interrupted run."""
    inputs = (files.input, flags.json_schema, flags.grammar, *(flags.lookup_file or ()))
    if files.output == STANDARD_STREAM:
        check_not_read("standard output", [1], inputs)
    else:
        models = (flags.model, flags.draft_model)
        check_not_read("--output", written(files.output), (*inputs, *models))
    options, batch_size = flags.options(), count_or_auto("--batch-size", files.batch_size)
    if batch_size != "auto" and batch_size < 1:
        raise OptionError(f"--batch-size must be 1 or more, not {batch_size}")
    budget = flags.memory()
    settings = {name: value for name, value in vars(flags).items() if name not in NO_MATTER}
    for name in ("json_schema", "regex", "grammar"):
        if text := getattr(options, name):
            settings[name] = sha256(text.encode()).hexdigest()
    lines = PromptLines(files.input)
    total = len(lines.prompts)
    with temporary_directory() as directory:
        is_printed = files.output == STANDARD_STREAM
        output = Path(directory) / "standard output" if is_printed else files.output
        header = {"input": str(files.input), "sha256": lines.sha256, "settings": settings}
        with Journal(output, header, lines.count, overwrite=files.overwrite) as journal:
            state = f"texts are in {journal.partial}; the same command goes on from here"
            if is_printed:
                state = "texts were made and none was written; --output FILE would have kept them"
            records = journal.records
            interrupts.at_end(lambda: f"interrupted: {len(records)} of {total} {state}")
            if records:
                render.note(f"going on: {len(records)} of {total} texts are there")
            from ..engine.memory import FIRST_BATCH_SIZE

            rows = min(FIRST_BATCH_SIZE if batch_size == "auto" else batch_size, total)
            pair, options = load_drafting(flags, options, history=True, rows=rows)
            if pair.task_prefix and options.chat_template:
                render.note(f'"{pair.task_prefix}" is put before every prompt that lacks it')
            from ..engine.generate import stream_many

            run = BatchRun(lines, journal, options, files.strict)
            how: dict[str, Any] = {"batch_size": batch_size, "memory_budget": budget}
            many = stream_many(pair, run.requests(), options, **how)
            with render.progress("prefilling prompts") as report:
                run.decode(many, report)
            errors = journal.errors()
            for line, error in errors if files.text else errors[:1]:
                render.tell(f"line {line}: {error}")
            if errors:
                where = "" if files.text else f': see "error" in {output.name}'
                render.tell(f"{len(errors)} of {len(records)} lines gave no text{where}")
            journal.finish(as_text=files.text)
        if is_printed:
            render.write(sys.stdout, output.read_text(encoding="utf-8"))
    render.note(_summary(run, many))
    if errors:
        raise typer.Exit(1)


def _prompt(entry: Mapping[str, Any]) -> str | Messages:
    if ("prompt" in entry) == ("messages" in entry):
        raise PromptError('the line must have either "prompt" or "messages"')
    if "prompt" in entry:
        return _text("prompt", entry["prompt"])
    messages, parts = entry["messages"], {"role", "content"}
    is_list = isinstance(messages, list) and len(messages) > 0
    if not is_list or not all(isinstance(item, dict) and item.keys() >= parts for item in messages):
        raise PromptError('"messages" must be a list of {"role": ..., "content": ...}')
    return [{name: _text(name, value) for name, value in item.items()} for item in messages]


def _options(entry: Mapping[str, Any], options: Options) -> Options:
    if common := sorted(COMMON & entry.keys()):
        raise OptionError(
            f'"{common[0]}" is one for all lines: leave it out; a line may have '
            f"{', '.join(PER_LINE)}"
        )
    changes = {name: entry[name] for name in PER_LINE if entry.get(name) is not None}
    for name, value in changes.items():
        if isinstance(value, bool):
            raise OptionError(f'"{name}" cannot be {str(value).lower()}')
    if "stop" in changes:
        stops = changes["stop"] if isinstance(changes["stop"], list) else [changes["stop"]]
        changes["stop"] = [_text("stop", stop) for stop in stops]
    return replace(options, **changes)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise PromptError(f'"{name}" must be a string, not {value!r:.80}')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError(f'"{name}" has half a character in it, a lone surrogate') from None
    return value


@dataclass
class BatchRun:
    """A run over the lines that have no result in the journal yet.

    Attributes:
        options: The settings of lines that do not override them.
        strict: Raise PromptError for the first line that fails, instead of writing its error.
        seconds: The time since the beginning of the run.
        sums: Statistics of the run.
        labels: The labels of the newest completion.
        named: The numbers and ids of lines, by the number of the request."""

    lines: PromptLines
    journal: Journal
    options: Options
    strict: bool
    seconds: float = 0.0
    sums: Counter[str] = field(default_factory=Counter)
    labels: Labels | None = None
    named: list[dict[str, Any]] = field(default_factory=list)

    def decode(self, many: Scheduler, report: render.Report) -> None:
        """Decode until every line has a result. Raises as stream_many and Journal do. many: The
        scheduler of `requests`. report: Called with the numbers of results and of lines."""
        for line, error in self.journal.errors() if self.strict else ():
            self._fail({"line": line}, error)
        self.journal.begin()
        started = time.perf_counter()
        for step in many:
            self.sums["tokens"] += len(step.tokens)
            if step.last:
                self._write(self.named[step.number], step)
            self.seconds = time.perf_counter() - started
            label = f"writing completions, {self.sums['tokens'] / self.seconds:.0f} tokens/s"
            report(len(self.journal.records), len(self.lines.prompts), label)

    def requests(self) -> Iterator[Request]:
        """Yield the requests of lines, which are read when the scheduler needs them. In a line of
        text, `\\n` means a line break."""
        from ..core.row import Request

        for line, text in self.lines.prompts.items():
            if line in self.journal.records:
                continue
            named: dict[str, Any] = {"line": line}
            try:
                if self.lines.as_json:
                    entry = json_object(text, "the line")
                    if (id := entry.get("id")) is not None:
                        whole = isinstance(id, int) and not isinstance(id, bool)
                        named["id"] = id if whole else _text("id", id)
                    request = Request(_prompt(entry), _options(entry, self.options))
                else:
                    request = Request(text.replace("\\n", "\n"), self.options)
            except SpecdecError as problem:
                self._fail(named, str(problem))
                continue
            self.named.append(named)
            yield request

    def _write(self, named: Mapping[str, Any], last: Step) -> None:
        if (result := last.result) is None:
            self._fail(named, last.error or "")
            return
        # Times and numbers of draft tokens are left out: they differ between runs.
        self.journal.append(
            {
                **named,
                "text": result.text,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.labels.prompt_tokens,
                "generated_tokens": len(result.tokens),
                "seed": result.labels.seed,
            }
        )
        stats, self.labels = result.stats, result.labels
        self.sums.update(
            texts=1, rounds=stats.rounds, drafted=stats.drafted, accepted=stats.accepted
        )

    def _fail(self, named: Mapping[str, Any], error: str) -> None:
        if self.strict:
            raise PromptError(f"line {named['line']} of {self.lines.name}: {error}")
        self.journal.append({**named, "error": error})


def _summary(run: BatchRun, many: Scheduler) -> str:
    """Return the statistics of this run, without earlier ones, in three lines."""
    sums, together = run.sums, f"up to {many.size.size} texts in a pass"
    if many.why_not is not None:
        together = f"one text at a time: {many.why_not}"
    drafts = "nothing was decoded"
    if run.labels is not None:
        drafts = render.drafts(sums["rounds"], sums["drafted"], sums["accepted"], run.labels)
    speed = sums["tokens"] / run.seconds if run.seconds else None
    pace = render.pace(sums["tokens"], run.seconds, speed)
    return f"{sums['texts']} texts, {pace}\n{drafts}\n{together}"
