"""Groups of flags, the construction of commands from groups, and the groups that several commands
have. A command's signature, which typer reads, is made of the fields of its groups. A group
inherits the flags of its base classes. As in all dataclasses, the fields of the last base come
first."""

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, dataclass_transform

import typer

from ..core.options import Options
from ..errors import OptionError
from ..system import load_blas, read_text
from ..version import __version__
from . import render

Command = Callable[..., None]
REQUIRED = MISSING
KEYWORD = inspect.Parameter.KEYWORD_ONLY
LARGEST_INT32 = 2**31 - 1
"""The largest whole number that a flag accepts, except for seeds: the largest int32, which MLX
uses."""
METAVARS = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}


def flag(help: str, default: Any = None, *aliases: str, **more: Any) -> Any:
    """Return a field of a group, which becomes a flag or an argument of the command.

    Args:
        help: The help text.
        default: The default value, or REQUIRED. A flag of type bool is off by default.
        aliases: Names of the flag besides the one that is made of the field's name.
        more: Arguments of typer.Option or typer.Argument, and two more. `argument` says whether it
            is an argument without a name. `panel` replaces the group's heading in --help."""
    return field(default=default, metadata={"help": help, "names": aliases, **more})


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(flag,),
)
@dataclass(frozen=True)
class Flags:
    """A group of flags. Each subclass is a dataclass, and `flag` makes its fields.

    Attributes:
        panel: The heading of the flags in --help. The base class gives the default."""

    panel: ClassVar[str]

    def __init_subclass__(cls, panel: str | None = None) -> None:
        if panel is not None:
            cls.panel = panel
        dataclass(frozen=True, kw_only=True)(cls)

    def for_options(self) -> dict[str, Any]:
        """Return the arguments of `Options` that have the same names as these flags, except for
        None, which stands for the default. Raises OptionError if flags are wrong."""
        names = {setting.name for setting in fields(Options)}
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value for name, value in given.items() if name in names}

    def begin(self) -> Self:
        """Return the flags with which the command runs. Called before the command."""
        return self


def command(*examples: str) -> Callable[[Command], Command]:
    """Make a command of a function whose parameters are groups of flags. The command has these
    flags and --version. examples: Command lines for the end of --help."""

    def decorate(function: Command) -> Command:
        groups: dict[str, type[Flags]] = typing.get_type_hints(function)
        del groups["return"]
        flat = [parameter for group in groups.values() for parameter in _parameters(group)]

        def run(**values: Any) -> None:
            load_blas()  # before MLX is imported
            for name, value in values.items():
                if name != "seed" and isinstance(value, int) and value > LARGEST_INT32:
                    flag_name = name.replace("_", "-")
                    raise OptionError(f"--{flag_name} must be {LARGEST_INT32} or less, not {value}")
            filled = [
                group(**{one.name: values[one.name] for one in fields(group)})
                for group in groups.values()
            ]
            # Only generate has both flags.
            silent = values.get("quiet") or ("quiet" in values and values.get("json"))
            render.silence(bool(silent))
            function(*(flags.begin() for flags in filled))

        version = inspect.Parameter("version", KEYWORD, default=False, annotation=Version)
        run.__signature__ = inspect.Signature([*flat, version])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.example = "\b\n" + "\n  ".join(["Example:", *examples])  # type: ignore[attr-defined]
        return run

    return decorate


def _parameters(group: type[Flags]) -> list[inspect.Parameter]:
    hints, parameters = typing.get_type_hints(group), []
    for one in fields(group):
        kind = hints[one.name]
        homes: list[Any] = [b for b in group.mro() if one.name in inspect.get_annotations(b)]
        settings: dict[str, Any] = {"metavar": _metavar(kind), **one.metadata}
        settings["rich_help_panel"] = settings.pop("panel", homes[-1].panel)
        names, is_argument = settings.pop("names"), settings.pop("argument", False)
        name = f"--{one.name.replace('_', '-')}"
        if kind == bool | None:
            name += f"/--no-{name.removeprefix('--')}"
        default = ... if one.default is REQUIRED else one.default
        default = False if kind is bool and default is None else default
        if is_argument:
            info = typer.Argument(default, **settings)
        else:
            info = typer.Option(default, name, *names, **settings)
        parameters.append(inspect.Parameter(one.name, KEYWORD, default=info, annotation=kind))
    return parameters


def _metavar(kind: Any) -> str | None:
    """Return the name for a flag's values in --help, or None for typer's own name."""
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    inner = [one for one in typing.get_args(kind) if one is not type(None)]
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


def by_model(otherwise: str) -> str:
    """Return the default that --help shows for a flag that generation_config.json may set."""
    return f"the model's own, or {otherwise}; bench takes {otherwise}"


class Json(Flags, panel="Output"):
    json: bool = flag("Print one JSON object on standard output.")


class SpecialTokens(Flags, panel="Output"):
    show_special_tokens: bool = flag(
        "Print special tokens too, except for tokens that end or pad a completion. The sentinels "
        "of a T5 that fills in gaps, such as extra_id_0, are printed anyway."
    )


class Constraints(Flags, panel="Constraints"):
    json_schema: str | None = flag(
        "The JSON schema of the completion: a file, or the schema itself in braces.",
        metavar="FILE|JSON",
    )
    regex: str | None = flag("The regular expression of the completion.")
    grammar: Path | None = flag(
        "A file with the grammar of the completion, in llguidance's variant of Lark or in GBNF.",
        metavar="FILE",
    )

    def for_options(self) -> dict[str, Any]:
        schema, grammar = self.json_schema, self.grammar
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = _contents("--json-schema", Path(schema), "; a schema itself begins with {")
        text = None if grammar is None else _contents("--grammar", grammar)
        return {**super().for_options(), "json_schema": schema, "grammar": text}


def _contents(name: str, file: Path, hint: str = "") -> str:
    """Return the text in the file that a flag names. Raises OptionError. hint: The end of the error
    if there is no such file."""
    if not file.exists():
        raise OptionError(f"{name}: there is no file {file}: check the path{hint}")
    return read_text(file, OptionError, f"{name}: ")


class PromptSettings(Flags, panel="Prompt"):
    no_chat_template: bool = flag(
        "Do not apply the chat template to the prompt.", None, "--ignore-chat-template"
    )
    system_prompt: str | None = flag(
        "The system message, which the chat template puts before the prompt."
    )
    chat_template_config: str | None = flag(
        "Variables for the chat template, for example '{\"enable_thinking\": false}'.",
        metavar="JSON",
    )
    target_lang: str | None = flag(
        "The language to translate into, by the model's own code, such as fra_Latn.", metavar="CODE"
    )
    source_lang: str | None = flag(
        "The language of the prompt, if a translation model needs it.", metavar="CODE"
    )
    prefill_step_size: int | None = flag(
        "The number of prompt tokens that are prefilled in one pass.",
        show_default="512; 2048 on a GPU with memory for it",
    )


class RuleFlags(Flags, panel="Verification"):
    rule: Literal["coupled", "token", "block", "typical"] | None = flag(
        "The rule by which draft tokens are accepted. With coupled, completions are the same as in "
        "plain decoding. Token and block keep the distribution, but not the completion of a seed; "
        "block accepts more. Typical is lossy.",
        show_default="coupled",
    )
    exact: bool = flag(
        "Keep the completion equal to plain decoding's even if this machine rounds passes of one "
        "token and of several tokens differently. A round then has at most 4 draft tokens, and a "
        "pass one prompt. Some models are refused."
    )


class Decoding(RuleFlags, PromptSettings, panel="Sampling"):
    """The flags of a completion that `bench` has too."""

    no_cost_cache: bool = flag(
        "Neither use nor save what earlier runs measured: costs of rounds, and acceptance.",
        panel="Drafting",
    )
    max_tokens: int = flag("The largest number of tokens to generate.", 100, "-m")
    seed: int = flag("The seed, which decides the completion above temperature 0.", 0)
    temperature: float | None = flag(
        "The sampling temperature; 0 is greedy.", None, "--temp", show_default=by_model("0")
    )
    top_p: float | None = flag(
        "The total probability of the tokens to keep; 1 keeps all.", show_default=by_model("1")
    )
    top_k: int | None = flag(
        "The number of likeliest tokens to keep; 0 keeps all.", show_default=by_model("0")
    )
    min_p: float | None = flag(
        "The least share of the likeliest token's probability; 0 keeps all.",
        show_default=by_model("0"),
    )

    def for_options(self) -> dict[str, Any]:
        text, config = self.chat_template_config or "{}", None
        with suppress(ValueError, RecursionError):
            config = json.loads(text)
        if not isinstance(config, dict):
            raise OptionError(
                '--chat-template-config must be a JSON object, for example {"key": true}, not '
                f"{text!r:.80}"
            )
        return {
            **super().for_options(),
            "chat_template": not self.no_chat_template,
            "chat_template_config": config,
            "cost_cache": not self.no_cost_cache,
        }


class ModelSampling(Decoding):
    """Further flags of a completion, and the model's own settings of sampling, which replace flags
    that were not given."""

    delta: float = flag(
        "How much more of the draft tokens the rule token accepts, from 0 to 1. Completions are "
        "lossy above 0.",
        0.0,
        panel="Verification",
    )
    greedy: bool = flag("Decode greedily, whatever the model's generation_config.json recommends.")
    repetition_penalty: float | None = flag(
        "The penalty factor for tokens of the completion and the prompt; the source of an "
        "encoder-decoder does not count. 1 is off.",
        show_default="the model's own, or 1",
    )
    xtc_probability: float = flag(
        "The share of positions at which XTC excludes the top choices; 0 turns XTC off.", 0.0
    )
    xtc_threshold: float = flag(
        "XTC excludes tokens above this probability, but never the least likely of them, a line "
        "end or the end of a completion.",
        0.1,
    )
    presence_penalty: float = flag(
        "The amount to subtract from the logits of tokens that the completion has.", 0.0
    )
    frequency_penalty: float = flag(
        "The amount to subtract for each time that the completion has a token.", 0.0
    )
    logit_bias: list[str] | None = flag(
        "A value to add to the logit of one token id; the flag may be repeated.", metavar="ID=VALUE"
    )
    stop: list[str] | None = flag(
        "A string before which the completion ends; the flag may be repeated."
    )
    extra_eos_token: list[str] | None = flag(
        "A token, or its id, that also ends the completion; the flag may be repeated."
    )

    def for_options(self) -> dict[str, Any]:
        if self.greedy and self.temperature:
            raise OptionError("--greedy means temperature 0: leave out --temperature or --greedy")
        biases: dict[int, float] = {}
        for item in self.logit_bias or ():
            token, _, value = item.partition("=")
            try:
                biases[int(token)] = float(value)
            except ValueError:
                raise OptionError(
                    f"--logit-bias must look like ID=VALUE, for example 42=-5, not {item!r}"
                ) from None
        return {**super().for_options(), "logit_bias": biases}

    def recommended(self, settings: Mapping[str, float]) -> dict[str, float]:
        """Return the settings of generation_config.json that no flag overrides. settings: All of
        its settings."""
        if self.greedy:
            return {}
        return {name: value for name, value in settings.items() if getattr(self, name) is None}
