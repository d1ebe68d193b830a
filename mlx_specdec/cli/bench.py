"""The bench command: measure a pair with a file of prompts, and show a table, JSON or a plot."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from ..core.options import Options, proposers
from ..errors import OptionError
from ..system import check_not_read
from . import interrupts, render
from .flags import Decoding, Flags, Json, command, flag
from .loading import Models, load_pair

LENGTHS = "1,2,3,5,8,auto"


class Measuring(Flags, panel="Measuring"):
    prompts: Path | None = flag(
        'A file with one prompt a line, or JSON lines with "prompt" or "turns", a list.',
        argument=True,
        metavar="PROMPTS",
    )
    proposer: list[str] | None = flag(
        "A proposer to measure, as in generate; the flag may be repeated.",
        metavar="NAME",
        autocompletion=proposers,
    )
    num_draft: str | None = flag(
        "The draft lengths to measure, separated by commas; only one if --batch-size is given.",
        None,
        "--num-draft-tokens",
        metavar="N,...,auto",
        show_default=f"{LENGTHS}; if --batch-size is given, auto",
    )
    batch_size: str | None = flag(
        "Measure the throughput over the complete file at these batch sizes, which are separated "
        "by commas.",
        metavar="N,...",
    )
    limit: int | None = flag("The number of prompts to use, from the first one on.", min=1)
    repeats: int = flag("The number of times that each completion is generated.", 3, min=1)
    plot: Path | None = flag(
        "A .png or .svg file to draw the speeds by draft length into, with matplotlib.",
        metavar="FILE",
    )

    def lengths(self) -> list[int | Literal["auto"]]:
        """Return the draft lengths. Raises OptionError if --num-draft is wrong."""
        text = self.num_draft or (LENGTHS if self.batch_size is None else "auto")
        lengths: list[int | Literal["auto"]] = [
            "auto" if word.strip() == "auto" else _count(word, "num-draft", "1,3,8,auto")
            for word in text.split(",")
        ]
        return [Options(num_draft=length).num_draft for length in dict.fromkeys(lengths)]


def _count(word: str, name: str, like: str) -> int:
    """Parse a number of a list. name, like: The flag and an example, for OptionError."""
    if word.strip().isdecimal() and int(word) > 0:
        return int(word)
    raise OptionError(f"{name} must look like {like}; {word.strip()!r} is no number above 0")


class Compared(Models):
    """Flags for a target and one or several draft models."""

    draft_model: list[str] | None = flag(  # type: ignore[assignment]
        "A draft model, as in generate; the flag may be repeated to compare several.",
        None,
        "--draft-model-name",
    )


@command(
    "mlx-specdec bench prompts/translation.jsonl --limit 10 --plot speed.svg",
    "mlx-specdec bench PROMPTS --model A --draft-model B --draft-model C",
    "mlx-specdec bench --batch-size 1,4,16",
)
def bench(measuring: Measuring, models: Compared, text: Decoding, output: Json) -> None:
    """Measure what speculation gains on this machine.

    Without arguments, the shipped translator is measured on its sample prompts. Ctrl-C shows the
    results so far."""
    options = Options(**text.for_options())
    words = [] if measuring.batch_size is None else measuring.batch_size.split(",")
    sizes = sorted({_count(word, "batch-size", "1,4,16") for word in words})
    lengths = measuring.lengths()
    names = list(dict.fromkeys(measuring.proposer or []))
    drafts = models.draft_model or []
    # The table of pairs names one draft.
    drafts = [drafts] if isinstance(drafts, str) else list(dict.fromkeys(drafts))
    if sizes:
        counts = {"length in --num-draft": len(lengths), "--proposer": len(names)}
        for flags, count in {**counts, "--draft-model": len(drafts)}.items():
            if count > 1:
                raise OptionError(f"with --batch-size, name one {flags}")
    if options.max_tokens < 1:
        raise OptionError(f"max-tokens must be 1 or more, not {options.max_tokens}")
    if measuring.plot is not None and sizes:
        raise OptionError("--plot draws draft lengths: leave it out, or --batch-size")
    one = Models(**{**vars(models), "draft_model": drafts[0] if drafts else None})
    model, draft_model = one.named()
    from ..engine.loading import with_draft_model
    from ..measure import figures
    from ..text.prompts import read_prompts

    file = measuring.prompts or figures.sample(model)
    if output.json:
        check_not_read("standard output", [1], [file])
    if measuring.plot is not None:
        figures.check_plot(measuring.plot)
        check_not_read("--plot", [measuring.plot], [file, model, draft_model])
    prompts = read_prompts(file, measuring.limit)
    loading = one.loading()
    pairs = [load_pair(model, draft_model, **loading)]
    of_target = ("revision", "q_bits", "adapter_path", "distributed")
    of_draft = {name: value for name, value in loading.items() if name not in of_target}
    for name in drafts[1:]:
        _, draft = replace(one, draft_model=name).named()
        with render.progress("downloading", in_bytes=True) as report:
            of_draft |= {"progress": report, "announce": render.tell}
            pairs.append(with_draft_model(pairs[0], str(draft), **of_draft))
    measured = pairs, options, prompts, names, lengths, sizes
    with render.progress("measuring") as bar:
        found, notes = figures.benchmark(*measured, repeats=measuring.repeats, progress=bar)
    if found is None:
        raise KeyboardInterrupt  # it came before there were any figures
    if found.interrupted:
        interrupts.go_on()
    taken_with = figures.setting(pairs, options, file, notes)
    heading = figures.title(taken_with)
    rows, best = [method.cells() for method in found.methods], figures.fastest(found.methods)
    bold = next((row for row, one in zip(rows, found.methods, strict=True) if one is best), None)
    stream = sys.stderr if output.json else sys.stdout
    table = render.fitted(stream, rows, figures.DISPENSABLE, bold)
    sentences = filter(None, (found.caption, found.verdict, *notes))
    render.lay_out(stream, heading, table, *sentences)
    for line in found.different(exact=options.exact):
        print(line, file=sys.stderr)
    if output.json:
        payload = {"setting": taken_with, **asdict(found)}
        render.write(sys.stdout, render.as_json(payload))
    if measuring.plot is not None:
        figures.draw_plot(found.methods, heading, measuring.plot)
        render.tell(f"plot: {measuring.plot}")
    if found.interrupted:
        raise KeyboardInterrupt
