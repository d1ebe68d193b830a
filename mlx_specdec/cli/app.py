"""`mlx-specdec`: the commands under one name.

Knows which commands there are. MLX is imported inside them, once the flags are known to be right,
so that --help and wrong flags answer at once.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from .batch import batch
from .bench import bench
from .calibrate import calibrate
from .chat import chat
from .convert import convert
from .estimate import estimate
from .flags import Command, Version
from .generate import generate
from .inspect import inspect
from .known_pairs import pairs
from .launch import launch
from .process import exit_with
from .serve import serve
from .train import train_draft, train_medusa

COMMANDS = (
    generate,
    chat,
    batch,
    serve,
    launch,
    pairs,
    convert,
    inspect,
    calibrate,
    bench,
    estimate,
    train_medusa,
    train_draft,
)
OTHER = "Other"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class PanelCommand(TyperCommand):
    """A command whose --help lists the flags by panel; no name of a flag is ever cut."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Called by typer."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                if parameter.param_type_name == "argument":
                    row = (parameter.metavar or parameter.name, row[1])
                panel = getattr(parameter, "rich_help_panel", None) or OTHER
                panels.setdefault(panel, []).append(row)
        panels[OTHER] = panels.pop(OTHER)  # last
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def _program(commands: tuple[Command, ...], **settings: Any) -> typer.Typer:
    program = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, **settings)
    for command in commands:
        epilog = command.example  # type: ignore[attr-defined]
        program.command(cls=PanelCommand, epilog=epilog, context_settings=CONTEXT)(command)
    return program


app = _program(
    COMMANDS,
    help="Speculative decoding on Apple's MLX: the target model's own text, faster.",
    epilog="Begin with: mlx-specdec generate",
    context_settings=CONTEXT,
)


@app.callback(invoke_without_command=True)
def _front(context: typer.Context, version: Version = False) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_one(command: Command) -> None:
    """Run one command as a program of its own, with the process's arguments."""
    exit_with(_program((command,), add_completion=False))


def main() -> None:
    """Run the commands under one name."""
    exit_with(app)
