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

from .. import system
from ..errors import OptionError, OutputError, SpecdecError, device_problem
from . import interrupts, render
from .batch import batch
from .bench import bench
from .chat import chat
from .convert import convert
from .doctor import doctor
from .estimate import estimate
from .flags import Command, Version
from .generate import generate
from .inspect import inspect
from .launch import PACKAGE, launch
from .models import models
from .pairs import pairs
from .removed import advice
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
WRONG_COUNT = "'-m': it must be a whole number"
"""The beginning of the error for `-m NAME`. Users of other programs name the model with -m."""
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
ELSEWHERE = {
    "list ls ps tags manage": "mlx-specdec models lists the models on this disk",
    "pull download fetch install": "a model of the Hub is downloaded at its first use, such as by "
    "mlx-specdec chat --model NAME",
    "run cli": "mlx-specdec chat --model NAME talks to a model",
    "rm remove delete uninstall": "mlx-specdec models remove NAME removes a model",
    "show info": "mlx-specdec inspect NAME shows what a model's files hold",
    "create import quantize awq dwq gptq": "mlx-specdec convert makes and quantizes models",
    "push upload share": "`hf upload USER/NAME DIRECTORY` uploads what mlx-specdec convert makes",
    "server start": "mlx-specdec serve starts the server",
    "stop": "Ctrl-C ends the server, and --idle-unload MINUTES unloads a model",
    "benchmark perplexity evaluate": "mlx-specdec bench measures models",
    "calibrate tune": "costs are learned while texts are generated, and mlx-specdec bench measures "
    "them",
    "train finetune lora fuse": "mlx-specdec train-draft trains a draft model, and --adapter-path "
    "loads an adapter",
    "complete completion translate": "mlx-specdec generate PROMPT does that",
    "embed embedding embeddings": "mlx-specdec serve answers /v1/embeddings",
    "version": "mlx-specdec --version prints the version",
    "login signin": "`hf auth login` does that for the Hub",
    "status check": "mlx-specdec doctor checks this installation",
}
"""Commands of mlx-lm, ollama, llama.cpp and similar programs -> what to do here."""
FOREIGN = {word: hint for words, hint in ELSEWHERE.items() for word in words.split()}
CERTAIN = 0.85
"""The least similarity to a command of another program at which a word is taken for it, as difflib
counts. For downlaod it is 0.875, and for listen and list it is 0.8."""
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class PanelCommand(TyperCommand):
    """A command whose --help lists flags by panel and shows names in full."""

    def invoke(self, ctx: Any) -> Any:
        """Load the BLAS before MLX is imported, and run the command. Called by typer."""
        system.load_blas()
        return super().invoke(ctx)

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
        names_no_command = not args or (_is_flag(args[0]) and args[0] not in top_level)
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
        if _is_flag(typed) or typed in self.commands:
            return super().resolve_command(ctx, args)
        word, hint = typed.lower(), ""
        if near := get_close_matches(word, self.commands, 1):
            hint = f"perhaps you mean {near[0]}"
        bare = word.removeprefix("mlx_lm.").removeprefix("llama-")
        if near := get_close_matches(bare, FOREIGN, 1, CERTAIN):
            hint = FOREIGN[near[0]]
        if hint and not ctx.resilient_parsing:
            prompt = shlex.quote(" ".join(takewhile(lambda word: not _is_flag(word), args)))
            raise OptionError(
                f"there is no command {typed}: {hint}; as a prompt, write: mlx-specdec generate "
                f"{prompt:.100}"
            )
        return super().resolve_command(ctx, ["generate", *args])


def _is_flag(word: str) -> bool:
    return word.startswith("-")


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


def run_one(command: Command) -> None:
    """Run one command as a program of its own, with the process's arguments."""
    exit_with(_program((command,), add_completion=False))


def main() -> None:
    """Run the commands under one name."""
    exit_with(app)


def exit_with(program: typer.Typer) -> NoReturn:
    """Run a program with the process's arguments and exit. The exit code is 2 after a one-line
    error, 130 after an interrupt, and otherwise the command's own. All ranks exit with the code of
    rank 0."""
    try:
        _run(program)
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


def _run(program: typer.Typer) -> NoReturn:
    _fill_streams()
    warnings.showwarning = lambda message, *_: render.tell(f"warning: {message}")
    interrupts.at_end(str)
    try:
        code = program(standalone_mode=False)
        if code == interrupts.INTERRUPTED:
            _exit_interrupted()
        sys.exit(code if isinstance(code, int) else 0)
    except SpecdecError as problem:
        if isinstance(problem, OutputError):
            _abandon_output()
        render.error(str(problem))
        sys.exit(2)
    except render.ReaderGone:
        _abandon_output()
        sys.exit(0)
    except KeyboardInterrupt:
        _exit_interrupted()
    except Exception as problem:
        if line := device_problem(problem):
            render.error(line)
            sys.exit(2)
        # typer's exceptions for wrong flags are recognized by their attributes.
        if type(problem).__name__ == "Abort":
            _exit_interrupted()
        if option := getattr(problem, "option_name", None):
            command = problem.ctx.command.name  # type: ignore[attr-defined]
            if removed := advice(command, option):
                render.error(removed)
                sys.exit(2)
        if describe := getattr(problem, "format_message", None):
            if similar := getattr(problem, "possibilities", None):
                # typer sorts suggestions by the alphabet. Show only one.
                del similar[1:]
            render.error(f"{_without_pydantic(describe())} (see --help)")
            sys.exit(2)
        if (status := getattr(problem, "exit_code", None)) is not None:
            sys.exit(status)
        if (ranks := _ranks()) is not None:
            ranks.explain()
        elif isinstance(problem, OSError):
            render.error(f"{problem!s:.300}")
            sys.exit(2)
        raise


def _without_pydantic(message: str) -> str:
    """Replace pydantic's words in typer's message about a wrong flag by plain ones."""
    plain = re.sub(r", unable to parse \w+ as an? \w+", "", message.replace("Value error, ", ""))
    plain = plain.replace("Input should be a valid integer", "it must be a whole number")
    plain = plain.replace("Input should be", "it must be").replace("a valid number", "a number")
    if "extra argument" in plain:
        plain += " - a prompt of several words needs quotes"
    return plain + ("; --model names a model" if WRONG_COUNT in plain else "")


def _exit_interrupted() -> NoReturn:
    if line := interrupts.last_words():
        render.tell(line)
    sys.exit(interrupts.INTERRUPTED)


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
