"""The file of models that `serve --models-preset` reads: a table of flags for each model."""

import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from ..errors import OptionError
from .flags import Flags

Group = TypeVar("Group", bound=Flags)
SHARED = ("memory_budget", "distributed", "status_file")
"""Flags that concern the whole server, so that the table of a model must not set them."""
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclass(frozen=True)
class Preset(Generic[Group]):
    """A model to serve. name, aliases: The name of its table, and the aliases in the table. Both
    are empty if there is no file."""

    flags: Group
    name: str = ""
    aliases: tuple[str, ...] = ()


def read_presets(
    file: Path, group: type[Group], make: Callable[[Mapping[str, Any]], Group]
) -> list[Preset[Group]]:
    """Read the tables of a file.

    Args:
        group: The flags that a table may set.
        make: Returns the flags of a model with the settings of a table.
    Raises:
        OptionError: If the file cannot be read or is no TOML, or a table is wrong. Errors of `make`
            are raised, too.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise OptionError(f"--models-preset: cannot read {file}: {problem.strerror}") from None
    except ValueError as problem:
        raise OptionError(f"--models-preset: {file} is not TOML: {problem}") from None
    if not tables:
        raise OptionError(f"--models-preset: {file} has no table: add one for each model")
    hints = typing.get_type_hints(group)
    settable = {one.name: one for one in fields(group) if one.name not in SHARED}
    presets = []
    for name, table in tables.items():
        where = f"{file}, [{name}]"
        if not isinstance(table, dict):
            raise OptionError(f"{file}: {name} must be a table with the flags of a model")
        aliases = _checked(f"{where}: aliases", list[str], table.pop("aliases", []), None)
        settings = {}
        for key, value in table.items():
            flag = key.replace("-", "_")
            if flag not in settable:
                near = get_close_matches(flag, settable, 1)
                hint = f"did you mean {near[0].replace('_', '-')}?" if near else "leave it out"
                raise OptionError(f"{where}: {key} is no flag of one model: {hint}")
            least = settable[flag].metadata.get("min")
            settings[flag] = _checked(f"{where}: {key}", hints[flag], value, least)
        if not settings.get("model"):
            raise OptionError(f'{where}: name the model, such as model = "weights/py-llama"')
        presets.append(Preset(make(settings), name, tuple(aliases)))
    return presets


def _checked(where: str, kind: Any, value: Any, least: float | None) -> Any:
    """Return a value as its flag's type. Raises OptionError."""
    options = [one for one in typing.get_args(kind) if one is not type(None)]
    origin = typing.get_origin(kind)
    if origin is Literal:
        words, fits = " or ".join(map(repr, options)), value in options
    elif origin is list:
        items = value if isinstance(value, list) else [None]
        return [_checked(f"an entry of {where}", options[0], item, None) for item in items]
    elif options:
        return _checked(where, options[0], value, least)
    else:
        words = WORDS.get(kind, WORDS[str])
        accepted = {float: (int, float), str: (str, int, float)}.get(kind, (str,))
        number = isinstance(value, kind if kind in (bool, int) else accepted)
        fits = number and (isinstance(value, bool) == (kind is bool))
        value = kind(value) if fits else value
    if fits and least is not None and value < least:
        words, fits = f"at least {least:g}", False
    if not fits:
        raise OptionError(f"{where} must be {words}, not {value!r:.80}")
    return value
