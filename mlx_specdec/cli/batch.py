"""The batch command: a file of prompts in, a file of texts out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import OptionError
from . import interrupts, render
from .batch_files import Journal, Lines
from .flags import (
    REQUIRED,
    ChatTemplate,
    Constraints,
    CostCache,
    Flags,
    Lenience,
    Penalties,
    Rule,
    Sampling,
    command,
    flag,
    options,
)
from .loading import Drafting, KVCache, Memory, Models, count_or_auto, load_drafting

if TYPE_CHECKING:
    from .batch_run import BatchRun

SHOWN_EVERY = 0.2
"""Seconds between two looks of the progress bar."""


@dataclass(frozen=True)
class Files(Flags):
    """What is read and written, and how much of it at once."""

    panel = "Batch"
    input: Path = flag(
        REQUIRED,
        "The file of prompts: one a line; or JSON lines, where its name ends in .jsonl or its "
        "first line is an object, each with prompt or messages, and maybe id, max_tokens, seed, "
        "temperature, top_p, stop.",
        argument=True,
        metavar="INPUT",
    )
    output: Path = flag(
        REQUIRED, "The file to write: JSON lines in the order of the input.", "-o", metavar="FILE"
    )
    batch_size: str = flag(
        "auto",
        "The number of texts that are decoded at once; auto takes what brings most tokens a "
        "second.",
        metavar="N|auto",
    )
    text: bool = flag(
        False, "Write the texts alone, a line for each line of the input, with \\n for line breaks."
    )
    strict: bool = flag(
        False, "Stop at the first line that cannot become a text, instead of going on."
    )
    overwrite: bool = flag(
        False, "Replace an output, and what a run with other settings left unfinished."
    )
    quiet: bool = flag(False, "Print no statistics.")

    def most_at_once(self) -> int | None:
        """None where that is not for the user to say. Raises OptionError."""
        size = count_or_auto("--batch-size", self.batch_size)
        if size == "auto":
            return None
        if size < 1:
            raise OptionError(f"--batch-size must be 1 or more, not {size}")
        return size


@command(
    "mlx-specdec batch sentences.txt --output translations.jsonl",
    "mlx-specdec batch a.txt -o b.txt --model weights/py-llama --batch-size 8",
)
def batch(
    files: Files,
    template: ChatTemplate,
    models: Models,
    cache: KVCache,
    memory: Memory,
    drafting: Drafting,
    costs: CostCache,
    rule: Rule,
    lenience: Lenience,
    sampling: Sampling,
    penalties: Penalties,
    constraints: Constraints,
) -> None:
    """Generate a text for each line of a file, many at once.

    A text is what its prompt becomes alone. The same command goes on where an interrupted one was.
    """
    groups = (template, drafting, rule, lenience, sampling, penalties)
    asked = options(*groups, costs, constraints, proposer=drafting.chosen_proposer(models))
    caches, batch_size, budget = cache.settings(), files.most_at_once(), memory.size()
    settings: dict[str, Any] = {}
    for group in (models, cache, *groups):
        settings |= vars(group)
    settings |= constraints.digests()
    for name in ("distributed", "status_file"):
        del settings[name]  # a text does not depend on how many machines wrote it
    with Lines(files.input) as lines:
        header = {"input": str(files.input), "sha256": lines.sha256, "settings": settings}
        with Journal(files.output, header, lines.count, overwrite=files.overwrite) as journal:
            interrupts.at_end(
                lambda: (
                    f"interrupted: {journal.done} of {lines.prompts} texts are in "
                    f"{journal.partial}; the same command goes on from here"
                )
            )
            if journal.done and not files.quiet:
                render.tell(f"going on: {journal.done} of {lines.prompts} texts are there")
            pair, asked = load_drafting(models, drafting, caches, asked, told=not files.quiet)
            if pair.task_prefix and asked.chat_template and not files.quiet:
                render.tell(f'"{pair.task_prefix}" is put before every prompt that lacks it')
            from .batch_run import BatchRun

            run = BatchRun(
                pair,
                lines,
                journal,
                asked,
                batch_size=batch_size,
                memory_budget=budget,
                strict=files.strict,
            )
            _decode(run, journal, lines.prompts)
            _tell_errors(journal, each=files.text)
            journal.finish(as_text=files.text)
    if not files.quiet:
        render.tell(render.batch_summary(run))
    if journal.failed:
        raise typer.Exit(1)


def _decode(run: BatchRun, journal: Journal, prompts: int) -> None:
    """Decode what is missing, in view."""
    before, shown = journal.done, 0.0
    with render.progress("reading prompts") as report:
        for _ in run:
            if time.monotonic() - shown < SHOWN_EVERY:
                continue
            shown, speed = time.monotonic(), run.figures.tokens_per_second
            label = f"{journal.done} of {prompts} texts"
            label += f", {speed:.0f} tokens/s" if speed else ""
            report(journal.done - before, prompts - before, label)


def _tell_errors(journal: Journal, *, each: bool) -> None:
    """How many lines gave no text, and why; each: of all, which are written nowhere else."""
    for line, error in journal.errors():
        render.tell(f"line {line}: {error}")
        if not each:
            break
    if journal.failed:
        where = "" if each else f': see "error" in {journal.output}'
        render.tell(f"{journal.failed} of {journal.done} lines gave no text{where}")
