"""The serve command: run a server until a signal ends it."""

from __future__ import annotations

import logging
import math
import sys
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from .. import system
from ..core.options import mtp_of
from ..engine.known_pairs import AUTO
from ..errors import OptionError
from ..system import parse_size, read_text
from .flags import Flags, command, flag
from .launch import PACKAGE
from .loading import MemoryFlags, TextFlags, load_drafting

if TYPE_CHECKING:
    from ..engine.prompt_cache import Store
    from ..serve.registry import ServedModel

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


class ServerFlags(Flags, panel="Server"):
    host: str = flag("The address to listen on; 0.0.0.0 is every one.", "127.0.0.1")
    port: int = flag("The port to listen on; 0 takes a free one.", 8080)
    api_key: list[str] | None = flag(
        "A key that clients have to send, as a bearer token or in x-api-key; the flag may be "
        "repeated. Lookup never drafts from texts of another key.",
        envvar="MLX_SPECDEC_API_KEY",
        show_envvar=True,
    )
    cors_origin: list[str] | None = flag(
        "An origin whose pages may ask, such as https://example.org; the flag may be repeated.",
        metavar="ORIGIN",
    )
    strict_model: bool = flag(
        "Refuse requests that name another model, instead of answering them with this one; several "
        "models always refuse them."
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "The lines that are written to standard error; info has a line for each request.", "info"
    )
    batch_size: int = flag("The number of requests that are decoded at once.", 16, min=1)
    timeout: float = flag("The seconds after which an answer is cut.", 600.0)
    idle_unload: float | None = flag(
        "The minutes without a request after which a model is unloaded, until the next request.",
        metavar="MINUTES",
        show_default="never",
        min=0,
    )
    no_wait: bool = flag(
        "Answer 503 with Retry-After while a model is loaded, instead of letting requests wait."
    )
    prompt_cache_bytes: str | None = flag(
        "The size limit of the prompt cache, such as 4GB; 0 keeps nothing.",
        metavar="SIZE",
        show_default="an eighth of the memory, 8 GiB at most",
    )
    prompt_cache_dir: Path | None = flag(
        "A directory in which the prompt cache is kept across restarts. It takes a quarter of the "
        "free space, 32 GiB at most.",
        metavar="DIR",
    )


class OneModel(MemoryFlags, TextFlags, panel="Server"):
    """The settings of one model, and flags that change the completions of requests to it."""

    max_tokens: int = flag(
        "The largest number of tokens of an answer, if a chat or a completion names none.",
        512,
        "-m",
    )
    seed: int | None = flag("The seed of requests that name none.", show_default="random")  # type: ignore[assignment]
    max_model_len: int | None = flag(
        "The largest number of tokens of a prompt and its answer together.",
        show_default="the model's own, or 4096",
        min=2,
    )
    tool_call_parser: str | None = flag(
        "The format in which the model calls tools, for a model whose chat template does not show "
        "it; an unknown name lists all.",
        metavar="NAME",
        show_default="by the chat template",
    )
    thinking_budget: int | None = flag(
        "The largest number of tokens of thoughts, if a request sets none.",
        metavar="TOKENS",
        show_default="no limit",
        min=0,
    )


class Requests(OneModel, panel="Model"):
    """These flags for several models, which requests select by name."""

    model: list[str] | None = flag(  # type: ignore[assignment]
        "A target: a directory, a name on the Hub, or auto, auto:code or auto:fast for a pair of "
        "the table that fits this machine. The flag may be repeated: requests select one of the "
        "models by its name, and each is loaded for its first request.",
        None,
        "--model-name",
        show_default="the shipped translator",
    )
    models_preset: Path | None = flag(
        "A TOML file with a table [NAME] for each model; requests use this name. A table has "
        "model, flags of the model without -- (such as draft-model), and aliases, a list.",
        metavar="FILE",
        exists=True,
        dir_okay=False,
    )

    def begin(self) -> Requests:
        return self

    def each(self) -> list[tuple[tuple[str, ...], OneModel]]:
        """Return the names and the flags of each model. The names come from the file of tables, and
        there are none without a file. Raises OptionError."""
        if self.models_preset is not None:
            if self.model is not None or self.distributed is not None:
                raise OptionError(
                    "--models-preset names all models, on one machine: leave --model and "
                    "--distributed out"
                )
            tables = read_presets(self.models_preset)
            return [(names, self._with(settings)) for names, settings in tables]
        names: list[str | None] = list(self.model or ()) or [None]
        if len(names) > 1 and self.distributed is not None:
            raise OptionError("--distributed serves one model: leave the others out")
        draft = self.draft_model
        if len(names) > 1 and draft not in (None, AUTO):
            raise OptionError(
                f"--draft-model {draft} would be the draft of every model: name each model's draft "
                "in a file, by --models-preset"
            )
        return [((), self._with({"model": name})) for name in names]

    def _with(self, settings: Mapping[str, Any]) -> OneModel:
        """Return these flags for one model, with other settings."""
        shared = {one.name: getattr(self, one.name) for one in fields(OneModel)}
        return OneModel(**{**shared, "model": None, **settings}).begin()


@command(
    "mlx-specdec serve",
    "mlx-specdec serve --model weights/py-llama --draft-model auto",
    "mlx-specdec serve --model weights/py-llama --model weights/t5-enfr",
)
def serve(server: ServerFlags, flags: Requests) -> None:
    """Serve models with the APIs of OpenAI, Anthropic and others.

    Without --model it is the shipped translator, from English to French. A request's text depends
    on its prompt, its settings and its seed alone, whatever else is served at the same time.
    Sampling flags are the defaults of requests that do not set them."""
    if server.idle_unload is not None and flags.distributed is not None:
        raise OptionError("--idle-unload is for one machine: leave --distributed out")
    models = flags.each()
    if not 0 <= server.port < 1 << 16:
        raise OptionError(f"--port must lie between 0 and 65535, not {server.port}")
    if not server.timeout > 0:
        raise OptionError(f"--timeout must be more than 0, not {server.timeout}")
    memory_budget, size = flags.memory(), server.prompt_cache_bytes
    cached_bytes = None if size is None else parse_size("--prompt-cache-bytes", size, zero=True)
    if cached_bytes == 0 and server.prompt_cache_dir is not None:
        raise OptionError("--prompt-cache-bytes 0 keeps nothing: leave --prompt-cache-dir out")
    if "" in (server.api_key or ()):
        raise OptionError("--api-key is empty: give a key, or leave it out")
    for origin in server.cors_origin or ():
        if origin not in ("*", "null") and "://" not in origin:
            raise OptionError(
                f"--cors-origin must be an origin such as https://example.org, not {origin:.80}"
            )
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise OptionError(f"the server needs {' and '.join(missing)}: {system.install('server')}")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    # Set the level of this package only, not of other libraries.
    logging.getLogger(PACKAGE).setLevel(server.log_level.upper())
    from ..engine.prompt_cache import Store
    from ..serve.app import Access
    from ..serve.registry import Registry
    from ..serve.server import serve as run

    store, several = Store(cached_bytes, server.prompt_cache_dir, len(models)), len(models) > 1
    registry = Registry(
        [_model(names, one, server, store, several=several) for names, one in models],
        batch_size=server.batch_size,
        memory_budget=memory_budget,
        idle_seconds=math.inf if server.idle_unload is None else 60 * server.idle_unload,
        waits=not server.no_wait,
        strict=server.strict_model,
    )
    access = Access(tuple(server.api_key or ()), tuple(server.cors_origin or ()))
    run(registry, server.host, server.port, access=access)


def _model(
    names: Sequence[str], flags: OneModel, server: ServerFlags, store: Store, *, several: bool
) -> ServedModel:
    """Return a model that may be loaded. Raises OptionError if its flags are wrong. names: Its
    name and its aliases; if there are none, it has the names of its directory."""
    from ..checkpoints.source import check, names_of, nbytes_of
    from ..serve.registry import ServedModel
    from ..serve.requests import ServiceSettings
    from ..text.markers import PARSER_NAMES

    (target, draft), options = flags.named(), flags.options()
    if flags.tool_call_parser not in (None, *PARSER_NAMES):
        raise OptionError(
            f"--tool-call-parser {flags.tool_call_parser:.80} is unknown: it must be one of "
            f"{', '.join(PARSER_NAMES)}"
        )
    if not several:
        # The model is loaded at once. Otherwise, lines of the log would precede this error.
        check(target, flags.revision)
        if draft is not None and mtp_of(draft) is None:
            check(draft)
    names = names or names_of(target)
    directory = store.directory
    if several and directory is not None:
        store = replace(store, directory=directory / quote(names[0], safe=""))
    history, rows = store.max_bytes != 0, server.batch_size
    return ServedModel(
        names[0],
        partial(load_drafting, flags, options, history=history, rows=rows),
        tuple(names[1:]),
        ServiceSettings(
            context=flags.max_model_len,
            seconds=server.timeout,
            drawn_seeds=flags.seed is None,
            tool_call_parser=flags.tool_call_parser or "",
            thinking_budget=flags.thinking_budget,
        ),
        store,
        sum(map(nbytes_of, filter(None, (target, draft)))),
        stays=flags.distributed is not None,
    )


def read_presets(file: Path) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the names and the settings of each table of a file for --models-preset. The names are
    the table's name and the aliases in it, and the settings are flags by name. Raises OptionError
    if the file cannot be read or is no TOML, or a table is wrong."""
    text = read_text(file, OptionError, "--models-preset: ")
    try:
        tables = tomllib.loads(text)
    except ValueError as problem:
        raise OptionError(f"--models-preset: {file} is not TOML: {problem}") from None
    if not tables:
        raise OptionError(f"--models-preset: {file} has no table: add one for each model")
    hints = typing.get_type_hints(OneModel)
    settable = {one.name: one for one in fields(OneModel) if one.name not in SERVER_FLAGS}
    for name, table in tables.items():
        where = f"{file}, [{name}]"
        if not isinstance(table, dict):
            raise OptionError(f"{file}: {name} must be a table with the flags of a model")
        aliases = _converted(f"{where}: aliases", list[str], table.pop("aliases", []))
        settings = {}
        for key, value in table.items():
            setting = key.replace("-", "_")
            if setting not in settable:
                near = get_close_matches(setting, settable, 1)
                hint = f"did you mean {near[0].replace('_', '-')}?" if near else "leave it out"
                raise OptionError(f"{where}: {key} is no flag of one model: {hint}")
            least = settable[setting].metadata.get("min")
            settings[setting] = _converted(f"{where}: {key}", hints[setting], value, least)
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
