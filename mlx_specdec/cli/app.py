"""The program that consists of all commands, its exit codes and its one-line errors."""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from difflib import get_close_matches
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import OptionError, OutputError, message
from ..system import hints
from . import interrupts, render
from .batch import batch
from .bench import bench
from .checkpoints import convert, inspect, models
from .flags import Command, Version
from .generate import chat, generate
from .launch import PACKAGE, launch
from .machine import doctor, estimate, pairs
from .serve import serve
from .train import train_draft, train_medusa

if TYPE_CHECKING:
    from ..models.distributed.group import Ranks

COMMANDS = (
    generate,
    chat,
    batch,
    serve,
    launch,
    pairs,
    models,
    doctor,
    convert,
    inspect,
    bench,
    estimate,
    train_medusa,
    train_draft,
)
OTHER = "Other"
FIRST_STEPS = """\
mlx-specdec writes the target model's own text, faster. First steps:

  mlx-specdec "Where is the station?"       translate with the model that comes with the program
  mlx-specdec chat --model auto             talk to the best model that fits this machine
  mlx-specdec serve --model auto            serve it to other programs, and as a page
  mlx-specdec pairs                         see which models fit, and what drafts gain
  mlx-specdec doctor                        check this installation
  mlx-specdec help                          list all commands
"""
"""The text for users who type no arguments in a terminal."""
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
CERTAIN = 0.85
"""The least similarity to a command of another program at which a word is taken for it, as difflib
counts. The similarity of downlaod and download is 0.875, and listen and list have 0.8."""


class PanelCommand(TyperCommand):
    """A command whose --help lists flags by panel and shows names in full."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the flags of --help by panel. Called by typer."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if row := parameter.get_help_record(ctx):
                if parameter.param_type_name == "argument":
                    row = (parameter.metavar or parameter.name, row[1])
                panel = getattr(parameter, "rich_help_panel", None) or OTHER
                panels.setdefault(panel, []).append(row)
        panels[OTHER] = panels.pop(OTHER)  # last
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


class Program(TyperGroup):
    """All commands. If the first argument is no command, generate receives all arguments. If there
    are no arguments, a terminal shows the first steps."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `generate` if no command is named. Called by typer, with resilient_parsing if a
        shell completes names. Raises OptionError if a command follows its flags."""
        top_level = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        names_no_command = not args or (args[0].startswith("-") and args[0] not in top_level)
        if args in (["help"], *(["help", name] for name in self.commands)):
            args = [*args[1:], "--help"]
        elif not (args or ctx.resilient_parsing) and sys.stdin.isatty():
            render.write(sys.stdout, FIRST_STEPS)
            raise typer.Exit
        elif not ctx.resilient_parsing and names_no_command:
            if late := next((word for word in args if word in self.commands), None):
                raise OptionError(
                    f"flags belong after the command: mlx-specdec {late} {args[0]} ..."
                )
            args = ["generate", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a word. Any other word begins the prompt of generate. Called by
        typer. Raises OptionError if the word resembles a command of this or of another program."""
        typed = args[0]
        if typed.startswith("-") or typed in self.commands:
            return super().resolve_command(ctx, args)
        word, foreign = typed.lower(), hints("commands")
        bare = word.removeprefix("mlx_lm.").removeprefix("llama-")
        found = [foreign[near] for near in get_close_matches(bare, foreign, 1, CERTAIN)]
        found += [f"perhaps you mean {near}" for near in get_close_matches(word, self.commands, 1)]
        hint = next(iter(found), "")
        if hint and not ctx.resilient_parsing:
            prompt = shlex.quote(" ".join(takewhile(lambda word: not word.startswith("-"), args)))
            raise OptionError(
                f"there is no command {typed}: {hint}; as a prompt, write: mlx-specdec generate "
                f"{prompt:.100}"
            )
        return super().resolve_command(ctx, ["generate", *args])


def _program(commands: tuple[Command, ...], **settings: Any) -> typer.Typer:
    program = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, **settings)
    for command in commands:
        epilog = command.example  # type: ignore[attr-defined]
        program.command(cls=PanelCommand, epilog=epilog, context_settings=CONTEXT_SETTINGS)(command)
    return program


app = _program(
    COMMANDS,
    cls=Program,
    help="Speculative decoding on Apple's MLX: the target model's own text, faster.",
    epilog='Begin with: mlx-specdec "Where is the station?"',
    context_settings=CONTEXT_SETTINGS,
)


@app.callback()
def _front(version: Version = False) -> None:
    """Take the flags that stand before a command."""


def main(command: Command | None = None) -> NoReturn:
    """Run all commands under one name, or one command as a program of its own, with the process's
    arguments, and exit. The exit code is 2 after a one-line error, 130 after an interrupt, and
    otherwise the command's own. All ranks exit with the code of rank 0."""
    try:
        sys.exit(_run(_program((command,), add_completion=False) if command else app))
    except SystemExit as end:
        if (ranks := _ranks()) is not None:
            try:
                ranks.end(end.code if isinstance(end.code, int) else int(end.code is not None))
            except RuntimeError:
                ranks.explain()
                raise
        raise


def _ranks() -> Ranks | None:
    """Return the ranks that share a model, or None. MLX is not imported for this."""
    group = sys.modules.get(f"{PACKAGE}.models.distributed.group")
    return None if group is None else group.met()


def _run(program: typer.Typer) -> int:
    """Run a program and return the exit code."""
    _fill_streams()
    warnings.showwarning = lambda warning, *_: render.tell(f"warning: {warning}")
    interrupts.at_end(str)
    try:
        code = int(program(standalone_mode=False) or 0)
    except render.ReaderGone:
        _abandon_output()
        return 0
    except (KeyboardInterrupt, typer.Abort):
        code = interrupts.INTERRUPTED
    except Exception as problem:
        if isinstance(problem, OutputError):
            _abandon_output()
        if not (line := message(problem) or _about_flags(problem)):
            if (status := getattr(problem, "exit_code", None)) is not None:
                return int(status)
            if (ranks := _ranks()) is not None:
                ranks.explain()
            if ranks is not None or not isinstance(problem, OSError):
                raise
            line = f"{problem!s:.300}"
        render.error(line)
        return 2
    if code == interrupts.INTERRUPTED and (line := interrupts.last_words()):
        render.tell(line)
    return code


def _about_flags(problem: Exception) -> str | None:
    """Return a line about wrong flags, or None for any other problem. typer's exceptions are
    recognized by their attributes."""
    if option := getattr(problem, "option_name", None):
        command, removed = problem.ctx.command.name, hints("flags")  # type: ignore[attr-defined]
        if instead := removed.get(f"{command} {option}") or removed.get(option):
            return f"{option} was removed in release 0.4: {instead}"
    if (describe := getattr(problem, "format_message", None)) is None:
        return None
    if similar := getattr(problem, "possibilities", None):
        del similar[1:]  # typer sorts suggestions by the alphabet; show only one
    plain = re.sub(r", unable to parse \w+ as an? \w+|Value error, ", "", describe())
    plain = plain.replace("Input should be a valid integer", "it must be a whole number")
    plain = plain.replace("Input should be", "it must be").replace("a valid number", "a number")
    if "extra argument" in plain:
        plain += " - a prompt of several words needs quotes"
    # Users of other programs name the model with -m.
    named = "; --model names a model" if "'-m': it must be a whole number" in plain else ""
    return f"{plain}{named} (see --help)"


def _fill_streams() -> None:
    """Open /dev/null for each standard stream that the caller has closed. Otherwise the next file
    that is opened would get the number of this stream."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115


def _abandon_output() -> None:
    """Redirect standard output to /dev/null, so that its buffer is not written at exit."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
