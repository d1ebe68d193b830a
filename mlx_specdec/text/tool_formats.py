"""Formats in which models write tool calls: one table for parsing, streaming and constraining them.

The names are those of mlx-lm's parsers, or of vLLM's parsers if mlx-lm has none."""

import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Parse = Callable[[str, Any], Any]
BETWEEN = re.compile(r"[\s,;\]]*")
"""Characters that separate or follow calls in JSON."""
Parts = tuple[str, ...]
"""A sequence of texts, regular expressions and markers. In a text, NAME is replaced by a name.
A regular expression begins with a slash. BEGIN and END are the markers of a section of calls."""
BEGIN, END = "BEGIN", "END"
LINE = r"/\n?/"


@dataclass(frozen=True)
class ArgumentTags:
    """Arguments between tags, as Qwen3-Coder, GLM and MiniMax write them, or in code.

    Attributes:
        before: The sequence before the value of an argument.
        end: The text that ends a value.
        after: The text after `end`.
        trimmed: Whether parsers strip white space around a string.
        between: The text between two arguments.
        quote: The text around strings, or "" if strings are written without quotes. With a double
            quote, all values are JSON. Otherwise, values that are no strings are JSON.
        nested: Whether parsers read lists and objects.
        excluded: A text that no string may contain, beside `end` and `quote`.
        names: Matches the names that parsers read.
    """

    before: Parts
    end: str = ""
    after: str = ""
    trimmed: bool = True
    between: str = ""
    quote: str = ""
    nested: bool = True
    excluded: str = ""
    names: re.Pattern[str] = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of a section of calls, around the arguments.

    Attributes:
        before: The sequence before the arguments of a call.
        after: The sequence after the arguments of a call.
        between: The sequence between two calls.
        first: The beginning of the section.
        last: The end of the section.
        tags: The tags of arguments, or None if arguments are JSON.
        single: Whether a call ends the output.
    """

    before: Parts
    after: Parts = ()
    between: Parts = ()
    first: Parts = ()
    last: Parts = ()
    tags: ArgumentTags | None = None
    single: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write tool calls.

    Attributes:
        begin: The text before a section of calls.
        end: The text after a section of calls, or "" if only the end of the answer ends it.
        parse: Turns the text between `begin` and `end`, and the tools, into one call or a list of
            calls, each with "name" and "arguments". Raises an exception for a text that is no call.
            None if mlx-lm has the parser, and with it `begin` and `end`.
        inner: Special tokens within a section.
        also: Further texts that begin a section.
        bare: Beginnings of a section without `begin`, at the start of an answer. They contain no
            white space; the model may write it anywhere.
        sign: Matches the chat templates of models with this format.
        head: Matches the text before arguments in JSON, so that arguments can be streamed. The
            search takes linear time: no part is tried at two lengths, and a name is a whole word.
        grammar: The grammar of demanded calls, or None if calls cannot be demanded.
        grammar_without_inner: The grammar if the tokenizer lacks the tokens of `inner`.
    """

    begin: str = ""
    end: str = ""
    parse: Parse | None = None
    inner: Sequence[str] = ()
    also: Sequence[str] = ()
    bare: Sequence[str] = ()
    sign: re.Pattern[str] | None = None
    head: re.Pattern[str] | None = None
    grammar: CallGrammar | None = None
    grammar_without_inner: CallGrammar | None = None


def json_calls(text: str, tools: Any) -> list[dict[str, Any]]:
    """Return the calls in a JSON list, or in JSON objects that follow each other. Raises
    ValueError."""
    found, place, decoder = [], 0, json.JSONDecoder()
    text = text.strip()
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        found += value if isinstance(value, list) else [value]
        place = BETWEEN.match(text, place).end()  # type: ignore[union-attr]
    return [_call(value) for value in found]


def _call(value: Any) -> dict[str, Any]:
    """Return the name and the arguments of a call in JSON. Raises ValueError."""
    called = value if isinstance(value, dict) else {}
    name, arguments = called.get("name"), called.get("arguments", called.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"no call: {value!r:.80}")
    return {"name": name, "arguments": arguments}


def _tagged_calls(text: str, tools: Any) -> Any:
    """Parse the call of a Seed-OSS, whose tags are those of Qwen3-Coder."""
    return importlib.import_module("mlx_lm.tool_parsers.qwen3_coder").parse_tool_call(text, tools)


def _longcat_call(text: str, tools: Any) -> Any:
    """Parse the call of a LongCat. mlx-lm's parser needs an argument."""
    if WORD.fullmatch(text.strip().replace("-", "_")):
        return {"name": text.strip(), "arguments": {}}
    return importlib.import_module("mlx_lm.tool_parsers.longcat").parse_tool_call(text, tools)


def _no_calls(text: str, tools: Any) -> list[Any]:
    """Return no call, since a Harmony channel has the call's name in its header."""
    return []


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_INNER = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_CALL, _SEPARATOR, _CALL_END = DEEPSEEK_INNER
KIMI_INNER = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END = KIMI_INNER
START, CHANNEL, MESSAGE, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
CONSTRAIN = "<|constrain|>"
MESSAGE_ENDS = ("<|end|>", CALL, "<|return|>")
HARMONY = (START, CHANNEL, CONSTRAIN, MESSAGE, *MESSAGE_ENDS)
"""Special tokens of OpenAI's Harmony format, in which gpt-oss writes."""

_S, _NAME = r"\s{0,64}+", r'[^"\\]{1,256}+'
_LISTED = (
    rf'\{{{_S}(?:"type"{_S}:{_S}"function"{_S},{_S})?"name"{_S}:{_S}"(?P<listed>{_NAME})"'
    rf'{_S},{_S}"(?:arguments|parameters)"{_S}:'
)
_JSON_HEAD = re.compile(rf"{_LISTED}{_S}(?=\{{)")
_DEEPSEEK_HEAD = re.compile(
    rf"{_CALL}{_S}(?P<fenced>function{_S}{_SEPARATOR}{_S})?"
    rf"(?P<name>[^\s<>{{]{{1,256}}+){_S}(?(fenced)```json|{_SEPARATOR}){_S}(?=\{{)"
)
_KIMI_HEAD = re.compile(
    r"(?<![^\s<>:{}])(?P<id>(?:functions\.)?(?P<name>[^\s<>:{}]{1,256}+):\d{1,16}+)"
    rf"{_S}{re.escape(_KIMI_ARGUMENTS)}{_S}(?=\{{)"
)
_MISTRAL_HEAD = re.compile(
    rf"(?:(?<![\w-])(?P<name>[\w-]{{1,256}}+){_S}\[ARGS\]|{_LISTED}){_S}(?=\{{)"
)

WORD, IDENTIFIER = re.compile(r"\w+", re.ASCII), re.compile(r"[A-Za-z_]\w*", re.ASCII)
_JSON_CALL = '{"name": "NAME", "arguments": '
_JSON_LIST = CallGrammar((_JSON_CALL,), ("}",), between=(", ",), first=(BEGIN, "["), last=("]",))
_GLM = ToolFormat(
    grammar=CallGrammar(
        (BEGIN, "NAME"),
        (LINE, END),
        between=(LINE,),
        # GLM 4.5 begins a line here, and GLM 4.7 does not.
        tags=ArgumentTags((LINE, "<arg_key>NAME</arg_key>", LINE, "<arg_value>"), "</arg_value>"),
    )
)
_GEMMA = CallGrammar(
    (BEGIN, "call:NAME{"),
    ("}", END),
    tags=ArgumentTags(("NAME:",), between=",", quote='<|"|>', names=WORD),
)
FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": ToolFormat(
        *DEEPSEEK,
        json_calls,
        DEEPSEEK_INNER,
        sign=re.compile(f"{DEEPSEEK[0]}(?s:.)*```json"),
        head=_DEEPSEEK_HEAD,
        grammar=CallGrammar(
            (f"{_CALL}function{_SEPARATOR}NAME\n```json\n",),
            (f"\n```{_CALL_END}",),
            between=(LINE,),
            first=(BEGIN,),
            last=(END,),
        ),
    ),
    "deepseek_v31": ToolFormat(
        *DEEPSEEK,
        json_calls,
        DEEPSEEK_INNER,
        sign=re.compile(DEEPSEEK[0]),
        head=_DEEPSEEK_HEAD,
        grammar=CallGrammar(
            (f"{_CALL}NAME{_SEPARATOR}",), (_CALL_END,), first=(BEGIN,), last=(END,)
        ),
    ),
    # The parser takes a call to end at its first brace.
    "function_gemma": ToolFormat(
        inner=("<escape>",),
        grammar=replace(
            _GEMMA,
            tags=ArgumentTags(
                ("NAME:",), between=",", quote="<escape>", nested=False, excluded="}", names=WORD
            ),
        ),
    ),
    "gemma4": ToolFormat(inner=('<|"|>',), grammar=_GEMMA),
    "glm47": _GLM,
    "harmony": ToolFormat(
        f"{CHANNEL}commentary to=functions.",
        CALL,
        _no_calls,
        (CONSTRAIN, MESSAGE),
        grammar=CallGrammar((BEGIN, f"NAME {CONSTRAIN}json{MESSAGE}"), single=True),
    ),
    "json_tools": ToolFormat(
        head=_JSON_HEAD,
        grammar=CallGrammar((BEGIN, f"\n{_JSON_CALL}"), ("}\n", END), between=(LINE,)),
    ),
    "kimi_k2": ToolFormat(
        inner=KIMI_INNER,
        head=_KIMI_HEAD,
        grammar=CallGrammar(
            (f"{_KIMI_CALL}functions.NAME:", "/[0-9]{1,3}/", _KIMI_ARGUMENTS),
            (_KIMI_CALL_END,),
            first=(BEGIN,),
            last=(END,),
        ),
    ),
    "laguna": _GLM,
    "llama3_json": ToolFormat(
        "<|python_tag|>",
        "",
        json_calls,
        bare=('{"name":"', '{"type":"function","name":"'),
        sign=re.compile('"parameters": dictionary of argument name'),
        head=_JSON_HEAD,
        # The chat templates of Llama 3 refuse a message with several calls.
        grammar=CallGrammar(('{"name": "NAME", "parameters": ',), ("}",), single=True),
    ),
    "longcat": ToolFormat(
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        _longcat_call,
        grammar=CallGrammar(
            (BEGIN, "NAME"),
            (LINE, END),
            between=(LINE,),
            tags=ArgumentTags(
                (LINE, "<longcat_arg_key>NAME</longcat_arg_key>", LINE, "<longcat_arg_value>"),
                "</longcat_arg_value>",
            ),
        ),
    ),
    "minicpm5": ToolFormat(
        grammar=CallGrammar(
            (BEGIN, '"NAME">'),
            (END,),
            between=(LINE,),
            tags=ArgumentTags((LINE, '<param name="NAME">'), "</param>", excluded="</function>"),
        )
    ),
    "minimax_m2": ToolFormat(
        grammar=CallGrammar(
            ('<invoke name="NAME">\n',),
            ("</invoke>\n",),
            first=(BEGIN, "\n"),
            last=(END,),
            tags=ArgumentTags(('<parameter name="NAME">',), "</parameter>", "\n"),
        )
    ),
    "mistral": ToolFormat(
        inner=("[ARGS]",),
        head=_MISTRAL_HEAD,
        grammar=CallGrammar((BEGIN, "NAME[ARGS]")),
        grammar_without_inner=replace(_JSON_LIST, first=(BEGIN, "/ ?/", "[")),
    ),
    "muse_spark": ToolFormat(
        grammar=CallGrammar(
            ('<atem:invoke name="NAME">\n',),
            ("</atem:invoke>\n",),
            first=(BEGIN, "\n"),
            last=(END,),
            # The parser reads every string that is JSON as JSON, so that strings need quotes.
            tags=ArgumentTags(
                ('<atem:parameter name="NAME">',), "</atem:parameter>", "\n", quote='"'
            ),
        )
    ),
    "phi4_mini_json": ToolFormat(
        "<|tool_call|>",
        "<|/tool_call|>",
        json_calls,
        also=("functools[",),
        sign=re.compile(r"<\|/tool(?:_call)?\|>|functools\["),
        head=_JSON_HEAD,
        grammar=replace(_JSON_LIST, last=("]", END)),
    ),
    "granite": ToolFormat(
        "<|tool_call|>",
        "",
        json_calls,
        also=("<tool_call>",),
        sign=re.compile(r"<\|tool_call\|>"),
        head=_JSON_HEAD,
        grammar=_JSON_LIST,
    ),
    "pythonic": ToolFormat(
        grammar=CallGrammar(
            ("NAME(",),
            (")",),
            between=(", ",),
            first=(BEGIN, "["),
            last=("]", END),
            tags=ArgumentTags(("NAME=",), between=", ", quote='"', names=IDENTIFIER),
        )
    ),
    "qwen3_coder": ToolFormat(
        grammar=CallGrammar(
            (BEGIN, "\n<function=NAME>\n"),
            ("</function>\n", END),
            between=(LINE,),
            tags=ArgumentTags(("<parameter=NAME>\n",), "\n</parameter>", "\n", trimmed=False),
        )
    ),
    "seed_oss": ToolFormat(
        "<seed:tool_call>",
        "</seed:tool_call>",
        _tagged_calls,
        sign=re.compile("<seed:tool_call>"),
        grammar=CallGrammar(
            (BEGIN, "\n<function=NAME>\n"),
            ("</function>\n", END),
            between=(LINE,),
            tags=ArgumentTags(("<parameter=NAME>",), "</parameter>", "\n"),
        ),
    ),
}
"""Formats by name, as far as more is known than mlx-lm's parser. Sources: the models' chat
templates, and vLLM's parsers. The first `sign` that matches decides: unlike V3.1, DeepSeek V3 puts
arguments into a code block, and unlike Granite, Phi-4 ends a section."""
NOT_READ = frozenset(("kimi_k3",))
"""Parsers of mlx-lm for models that divide the complete answer into sections."""
VLLM_NAMES = {
    "glm45": "glm47",
    "hermes": "json_tools",
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
}
"""Names of vLLM's parsers, if mlx-lm has another name for the same format."""


def format_in(chat_template: str) -> str | None:
    """Return the name of the format that a chat template shows, or None."""
    signs = ((name, entry.sign) for name, entry in FORMATS.items())
    return next((name for name, sign in signs if sign and sign.search(chat_template)), None)


def format_named(name: str) -> ToolFormat:
    """Return the format of this name, with mlx-lm's parser if it needs one."""
    entry = FORMATS.get(name, ToolFormat())
    if entry.parse is not None:
        return entry
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    begin, end = module.tool_call_start, module.tool_call_end
    return replace(entry, begin=begin, end=end, parse=module.parse_tool_call)


def parser_names() -> list[str]:
    """Return the names that `format_named` takes, and vLLM's names. mlx-lm is not imported. Harmony
    is left out, because models with another format cannot write it."""
    spec = find_spec("mlx_lm")
    roots = [] if spec is None else spec.submodule_search_locations or []
    places = [str(Path(root) / "tool_parsers") for root in roots]
    found = {module.name for module in pkgutil.iter_modules(places)} - NOT_READ
    parsed = {name for name, entry in FORMATS.items() if entry.parse is not None} - {"harmony"}
    return sorted({*found, *parsed, *VLLM_NAMES})
