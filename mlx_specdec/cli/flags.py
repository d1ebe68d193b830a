"""How groups of flags become commands; each group is one panel of --help.

A command takes groups in place of single flags, and `command` makes of their fields the signature
that typer reads. Imports no MLX.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer

from .. import __version__
from ..errors import OptionError
from ..options import Options

Command = Callable[..., None]
REQUIRED = MISSING
KEYWORD = inspect.Parameter.KEYWORD_ONLY
MOST = 2**31 - 1
"""Of a whole number, seeds apart: MLX counts no further."""
METAVARS = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}


def flag(default: Any, help: str, *aliases: str, argument: bool = False, **more: Any) -> Any:
    """A field of a group: --its-name and aliases, or an argument; more: of `typer.Option`."""
    return field(default=default, metadata={"names": aliases, "is": argument, "help": help, **more})


@dataclass(frozen=True)
class Flags:
    """A group of flags: a frozen dataclass whose fields are made by `flag`."""

    panel: ClassVar[str]

    def for_options(self) -> dict[str, Any]:
        """What these flags say about `Options`: the fields that have the same name there."""
        names = {one.name for one in fields(Options)}
        return {name: value for name, value in vars(self).items() if name in names}

    def begin(self, groups: Mapping[str, Flags]) -> None:
        """Called before the command does anything. groups: all that it was given."""
        return None


def options(*groups: Flags, **more: Any) -> Options:
    """The settings of a generation from groups of flags. Raises OptionError."""
    merged: dict[str, Any] = {}
    for group in groups:
        merged |= group.for_options()
    return Options(**{**merged, **more})


def command(*examples: str) -> Callable[[Command], Command]:
    """Make a function of groups a command of single flags, with --version.

    examples: command lines, shown at the end of --help.
    """

    def decorate(function: Command) -> Command:
        groups: dict[str, type[Flags]] = get_type_hints(function)
        del groups["return"]
        flat = [parameter for group in groups.values() for parameter in _parameters(group)]

        def run(**given: Any) -> None:
            for name, value in given.items():
                if name != "seed" and isinstance(value, int) and value > MOST:
                    flag_name = name.replace("_", "-")
                    raise OptionError(f"--{flag_name} must be {MOST} or less, not {value}")
            made = {
                name: group(**{one.name: given[one.name] for one in fields(group)})
                for name, group in groups.items()
            }
            for each in made.values():
                each.begin(made)
            function(**made)

        version = inspect.Parameter("version", KEYWORD, default=False, annotation=Version)
        run.__signature__ = inspect.Signature([*flat, version])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.example = "\b\n" + "\n  ".join(["Example:", *examples])  # type: ignore[attr-defined]
        return run

    return decorate


def _parameters(group: type[Flags]) -> list[inspect.Parameter]:
    hints, parameters = get_type_hints(group), []
    for one in fields(group):
        kind = hints[one.name]
        told: dict[str, Any] = {"metavar": _metavar(kind), **one.metadata}
        told["rich_help_panel"] = group.panel
        names, is_argument = told.pop("names"), told.pop("is")
        name = f"--{one.name.replace('_', '-')}"
        if kind == bool | None:
            name += f"/--no-{name.removeprefix('--')}"
        default = ... if one.default is REQUIRED else one.default
        if is_argument:
            info = typer.Argument(default, **told)
        else:
            info = typer.Option(default, name, *names, **told)
        parameters.append(inspect.Parameter(one.name, KEYWORD, default=info, annotation=kind))
    return parameters


def _metavar(kind: Any) -> str | None:
    """A word for the values of a flag that is no Python type."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    inner = [one for one in get_args(kind) if one is not type(None)]
    return _metavar(inner[0]) if inner else METAVARS.get(kind)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-specdec {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
]
