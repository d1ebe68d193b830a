"""Formats in which models write tool calls: one table for reading and constraining them.

The names are those of mlx-lm's parsers, or of vLLM's parsers if mlx-lm has none. tool_calls.py says
how each format writes a string."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .tool_calls import CallReader, GemmaCalls, JsonCalls, PythonCalls, TaggedCalls

Parts = tuple[str, ...]
"""A sequence of texts, regular expressions and markers. In a text, NAME is replaced by a name.
A regular expression begins with a slash. BEGIN and END are the markers of a section of calls."""
BEGIN, END = "BEGIN", "END"
LINE = r"/\n?/"


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of a section of calls, around the arguments in JSON.

    Attributes:
        before: The sequence before the arguments of a call.
        after: The sequence after the arguments of a call.
        between: The sequence between two calls.
        first: The beginning of the section.
        last: The end of the section.
        single: Whether a call ends the output.
    """

    before: Parts
    after: Parts = ()
    between: Parts = ()
    first: Parts = ()
    last: Parts = ()
    single: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write tool calls.

    Attributes:
        begin: The text before a section of calls.
        end: The text after a section of calls, or "" if only the end of the answer ends it.
        reader: Reads the text between `begin` and `end`.
        inner: Special tokens within a section.
        also: Further texts that begin a section.
        bare: Beginnings of a section without `begin`, at the start of an answer. They contain no
            white space; the model may write it anywhere.
        sign: Matches the chat templates of models with this format, or None for a format that no
            template distinguishes from another one.
        grammar: The grammar of demanded calls, or None if arguments are not JSON. Then demanded
            calls are free after `begin`.
        grammar_without_inner: The grammar if the tokenizer lacks the tokens of `inner`.
    """

    begin: str
    end: str
    reader: CallReader
    inner: Sequence[str] = ()
    also: Sequence[str] = ()
    bare: Sequence[str] = ()
    sign: re.Pattern[str] | None = None
    grammar: CallGrammar | None = None
    grammar_without_inner: CallGrammar | None = None


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

_DEEPSEEK = JsonCalls(
    (*DEEPSEEK, _CALL, _CALL_END),
    re.compile(
        rf"(?:function\s*{_SEPARATOR}\s*)?(?P<name>[^\s<>{{]{{1,256}}+)\s*"
        rf"(?:```json|{_SEPARATOR})\s*"
    ),
)
_KIMI = JsonCalls(
    ("<|tool_calls_section_end|>", _KIMI_CALL, _KIMI_CALL_END),
    re.compile(
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<>:{}]{1,256}+):\d{1,16}+)\s*"
        rf"{re.escape(_KIMI_ARGUMENTS)}\s*"
    ),
)
_MISTRAL = JsonCalls(
    ("[TOOL_CALLS]",),
    re.compile(r"(?P<name>[\w-]{1,256}+)\s*(?:\[CALL_ID\]\s*(?P<id>[\w-]{1,256}+)\s*)?\[ARGS\]\s*"),
)


def _glm_calls(prefix: str) -> TaggedCalls:
    return TaggedCalls(
        f"<{prefix}tool_call>",
        f"</{prefix}tool_call>",
        r"(?P<name>[^\s<{]+)\s*",
        rf"<{prefix}arg_key>(?P<name>[^<]*)</{prefix}arg_key>\s*<{prefix}arg_value>",
        f"</{prefix}arg_value>",
    )


def _qwen_calls(prefix: str, *, lines: bool) -> TaggedCalls:
    return TaggedCalls(
        f"<{prefix}tool_call>",
        f"</{prefix}tool_call>",
        r"<function=(?P<name>[^\s<>]+)>\s*",
        r"<parameter=(?P<name>[^\s<>]+)>",
        "</parameter>",
        "</function>",
        lines,
    )


def _invoked_calls(begin: str, end: str, space: str) -> TaggedCalls:
    return TaggedCalls(
        begin,
        end,
        rf"<{space}invoke\s[^>]*?name=(?P<name>[^>]+)>\s*",
        rf"<{space}parameter\s[^>]*?name=(?P<name>[^>]+)>",
        f"</{space}parameter>",
        f"</{space}invoke>",
    )


_JSON_CALL = '{"name": "NAME", "arguments": '
_JSON_LIST = CallGrammar((_JSON_CALL,), ("}",), between=(", ",), first=(BEGIN, "["), last=("]",))
_GLM = ToolFormat("<tool_call>", "</tool_call>", _glm_calls(""), sign=re.compile("<arg_key>"))


def _gemma(begin: str, end: str, quote: str, sign: str) -> ToolFormat:
    return ToolFormat(begin, end, GemmaCalls(end, quote), (quote,), sign=re.compile(sign))


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "minimax_m2": ToolFormat(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _invoked_calls("<minimax:tool_call>", "</minimax:tool_call>", ""),
        sign=re.compile("<minimax:tool_call>"),
    ),
    "gemma4": _gemma(
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        r"(?s)\A(?=.*<\|tool_call>)(?=.*<tool_call\|>)",
    ),
    "function_gemma": _gemma(
        "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_call>"
    ),
    "longcat": ToolFormat(
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        _glm_calls("longcat_"),
        sign=re.compile("<longcat_tool_call>"),
    ),
    "glm47": _GLM,
    "pythonic": ToolFormat(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        PythonCalls("<|tool_call_end|>"),
        sign=re.compile(r"<\|tool_list_start\|>|<\|tool_call_start\|>"),
    ),
    "qwen3_coder": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        _qwen_calls("", lines=True),
        sign=re.compile(r"<tool_call>(?:\\n|\s)*<function="),
    ),
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _KIMI,
        KIMI_INNER,
        sign=re.compile(r"<\|tool_calls_section_begin\|>"),
        grammar=CallGrammar(
            (f"{_KIMI_CALL}functions.NAME:", "/[0-9]{1,3}/", _KIMI_ARGUMENTS),
            (_KIMI_CALL_END,),
            first=(BEGIN,),
            last=(END,),
        ),
    ),
    "minicpm5": ToolFormat(
        "<function name=",
        "</function>",
        TaggedCalls(
            "<function name=",
            "</function>",
            r"(?P<name>\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>\s*",
            r"<param\s+name\s*=\s*(?P<name>\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>",
            "</param>",
        ),
        sign=re.compile(r'(?s)\A(?=.*<function name=")(?=.*<param name=")'),
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]",
        "",
        _MISTRAL,
        ("[ARGS]", "[CALL_ID]"),
        sign=re.compile(r"\[TOOL_CALLS\]"),
        grammar=CallGrammar((BEGIN, "NAME[ARGS]")),
        grammar_without_inner=replace(_JSON_LIST, first=(BEGIN, "/ ?/", "[")),
    ),
    "muse_spark": ToolFormat(
        "<atem:function_calls>",
        "</atem:function_calls>",
        _invoked_calls("<atem:function_calls>", "</atem:function_calls>", "atem:"),
        sign=re.compile("<atem:function_calls>"),
    ),
    "json_tools": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        JsonCalls(("</tool_call>",)),
        sign=re.compile(r"(?s)\A(?=.*<tool_call>)(?=.*tool_call\.name)"),
        grammar=CallGrammar((BEGIN, f"\n{_JSON_CALL}"), ("}\n", END), between=(LINE,)),
    ),
    "deepseek_v3": ToolFormat(
        *DEEPSEEK,
        _DEEPSEEK,
        DEEPSEEK_INNER,
        sign=re.compile(f"{DEEPSEEK[0]}(?s:.)*```json"),
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
        _DEEPSEEK,
        DEEPSEEK_INNER,
        sign=re.compile(DEEPSEEK[0]),
        grammar=CallGrammar(
            (f"{_CALL}NAME{_SEPARATOR}",), (_CALL_END,), first=(BEGIN,), last=(END,)
        ),
    ),
    "llama3_json": ToolFormat(
        "<|python_tag|>",
        "",
        JsonCalls(),
        bare=('{"name":"', '{"type":"function","name":"'),
        sign=re.compile('"parameters": dictionary of argument name'),
        # The chat templates of Llama 3 refuse a message with several calls.
        grammar=CallGrammar(('{"name": "NAME", "parameters": ',), ("}",), single=True),
    ),
    "phi4_mini_json": ToolFormat(
        "<|tool_call|>",
        "<|/tool_call|>",
        JsonCalls(("<|/tool_call|>",)),
        also=("functools[",),
        sign=re.compile(r"<\|/tool(?:_call)?\|>|functools\["),
        grammar=replace(_JSON_LIST, last=("]", END)),
    ),
    "granite": ToolFormat(
        "<|tool_call|>",
        "",
        JsonCalls(),
        also=("<tool_call>",),
        sign=re.compile(r"<\|tool_call\|>"),
        grammar=_JSON_LIST,
    ),
    "seed_oss": ToolFormat(
        "<seed:tool_call>",
        "</seed:tool_call>",
        _qwen_calls("seed:", lines=False),
        sign=re.compile("<seed:tool_call>"),
    ),
    "laguna": replace(_GLM, sign=None),
    # A call in a Harmony channel is a message of its own, so that no section is read.
    "harmony": ToolFormat(
        f"{CHANNEL}commentary to=functions.",
        CALL,
        JsonCalls(),
        (CONSTRAIN, MESSAGE),
        grammar=CallGrammar((BEGIN, f"NAME {CONSTRAIN}json{MESSAGE}"), single=True),
    ),
}
"""Formats by name. Sources: the models' chat templates, and the parsers of mlx-lm and vLLM. The
first `sign` that matches decides: unlike V3.1, DeepSeek V3 puts arguments into a code block, and
unlike Granite, Phi-4 ends a section."""
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
    signs = ((name, entry.sign) for name, entry in TOOL_FORMATS.items())
    return next((name for name, sign in signs if sign and sign.search(chat_template)), None)


def parser_names() -> list[str]:
    """Return the names of formats, and vLLM's names. Harmony is left out, because models with
    another format cannot write it."""
    return sorted({*TOOL_FORMATS, *VLLM_NAMES} - {"harmony"})
