"""The file of models that `serve --models-preset` reads: a table of flags for each model."""

import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from ..errors import OptionError
from ..system import read_text
from .flags import Flags

SERVER_FLAGS = ("memory_budget", "distributed")
"""Flags that concern the whole server, so that the table of a model must not set them."""
FLAG_TYPES: Mapping[Any, tuple[str, Any]] = {
    bool: ("true or false", bool),
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("a string", (str, int, float)),
    Path: ("a string", str),
}
"""Type of a flag -> the words for its values in an error, and the types that are accepted in a
table. Some numbers are flags of text, because they may also be "auto"."""


def read_presets(
    file: Path, group: type[Flags]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the names and the settings of each table of a file: the name of the table with the
    aliases in it, and the flags by name. Raises OptionError if the file cannot be read or is no
    TOML, or a table is wrong. group: The flags that a table may set."""
    text = read_text(file, OptionError, "--models-preset: ")
    try:
        tables = tomllib.loads(text)
    except ValueError as problem:
        raise OptionError(f"--models-preset: {file} is not TOML: {problem}") from None
    if not tables:
        raise OptionError(f"--models-preset: {file} has no table: add one for each model")
    hints = typing.get_type_hints(group)
    settable = {one.name: one for one in fields(group) if one.name not in SERVER_FLAGS}
    for name, table in tables.items():
        where = f"{file}, [{name}]"
        if not isinstance(table, dict):
            raise OptionError(f"{file}: {name} must be a table with the flags of a model")
        aliases = _converted(f"{where}: aliases", list[str], table.pop("aliases", []))
        settings = {}
        for key, value in table.items():
            flag = key.replace("-", "_")
            if flag not in settable:
                near = get_close_matches(flag, settable, 1)
                hint = f"did you mean {near[0].replace('_', '-')}?" if near else "leave it out"
                raise OptionError(f"{where}: {key} is no flag of one model: {hint}")
            least = settable[flag].metadata.get("min")
            settings[flag] = _converted(f"{where}: {key}", hints[flag], value, least)
        if not settings.get("model"):
            raise OptionError(f'{where}: name the model, such as model = "weights/py-llama"')
        yield (name, *aliases), settings


def _converted(where: str, kind: Any, value: Any, least: float | None = None) -> Any:
    """Return a value of a table as the type of its flag. Raises OptionError if it has another type.

    Args:
        where: The flag, for the error message.
        kind: The type of the flag.
        least: The least value of a number; None without a limit."""
    inner = [one for one in typing.get_args(kind) if one is not type(None)]
    if typing.get_origin(kind) is list:
        items = value if isinstance(value, list) else [None]
        return [_converted(f"an entry of {where}", inner[0], item) for item in items]
    if typing.get_origin(kind) is Literal:
        wanted, fits = " or ".join(map(repr, inner)), value in inner
    elif inner:  # a flag that may be None, such as int | None
        return _converted(where, inner[0], value, least)
    else:
        wanted, accepted = FLAG_TYPES.get(kind, FLAG_TYPES[Path])
        fits = isinstance(value, accepted) and isinstance(value, bool) == (kind is bool)
        value = kind(value) if fits else value
        if fits and least is not None and value < least:
            wanted, fits = f"at least {least:g}", False
    if not fits:
        raise OptionError(f"{where} must be {wanted}, not {value!r:.80}")
    return value
