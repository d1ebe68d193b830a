"""Messages to token ids, by a checkpoint's chat template, a stranger's program. It runs in jinja's
sandbox, as transformers documents it, without the seconds that importing transformers takes. The
sandbox limits a template's time and output."""

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from ..errors import CheckpointError, OptionError, first_line

Messages = Sequence[Mapping[str, str]]
"""Each has "role" and "content"."""
Settings = Mapping[str, Any] | None
Ending = Literal["answer", "continue", "closed"]
"""How a prompt ends: with the header of a new answer, with the last message left open for the model
to continue, or with the last message closed."""
Chat = tuple[str, Mapping[str, Any], Callable[[str], Sequence[int]]]
"""A template, the special tokens that it may name, and what encodes the text that it writes."""
_RESERVED = (
    "add_generation_prompt chat_template continue_final_message conversation documents max_length "
    "messages padding return_assistant_tokens_mask return_dict return_tensors self tokenize "
    "sanitize_control_tokens tokenizer_kwargs tools truncation"
)
RESERVED = frozenset(_RESERVED.split())
"""Names that transformers' apply_chat_template takes for itself."""
MOST_CHARACTERS, SECONDS = 1 << 24, 5.0
"""Limits of one rendering: characters, also of one product, and seconds of processor time."""
_GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation\b")
"""A block around what the assistant wrote, which trainers look for; `with` has its scope."""
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Where the text to be continued ends; a template may cut its space."""

_DEADLINE = " deadline"
"""A variable that no template can name."""
_CALL = (
    ("variable_begin", "{{"),
    ("name", "__clock"),
    ("lparen", "("),
    ("rparen", ")"),
    ("variable_end", "}}"),
)
"""The tokens of a call of `__clock`."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise OptionError for names that are not variables of a template."""
    for name in settings:
        if name in RESERVED:
            raise OptionError(f"chat-template-config may not set {name}: leave it out")


def apply(
    chat: Callable[[bool], Chat],
    prompt: str | Messages,
    settings: Settings = None,
    *,
    ending: Ending = "answer",
) -> list[int]:
    """Return the token ids of messages, or of a text as the user's only one. Raises CheckpointError
    if the template fails or takes too much. chat: called with whether there are tools. settings:
    variables of the template, and "tools"."""
    conversation = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    )
    try:
        source, special, encode = chat((settings or {}).get("tools") is not None)
        # Copies: objects may have methods that the sandbox does not know.
        messages, variables = json.loads(json.dumps([conversation, settings or {}], default=str))
        variables = {"tools": None, "documents": None, **special, **variables}
        variables["add_generation_prompt"] = ending == "answer"
        return list(encode(_rendered(source, messages, variables, ending == "continue")))
    except CheckpointError:
        raise
    except Exception as problem:  # templates are programs and fail in their own ways
        raise CheckpointError(
            f"the chat template cannot be applied ({first_line(problem):.170}): use "
            "--no-chat-template"
        ) from None


def _rendered(source: str, messages: Any, variables: dict[str, Any], goes_on: bool) -> str:
    template = _compiler()(_GENERATION.sub(r"\1with", source))
    for place, message in enumerate(messages):
        filled = {name: value for name, value in message.items() if value is not None}
        names = ("reasoning_content", "thinking", "reasoning")  # templates read the first two
        for thoughts in [filled[name] for name in names if name in filled][:1]:
            filled = {"thinking": thoughts, **filled, "reasoning_content": thoughts}
        messages[place] = filled
    if goes_on:
        last, name = messages[-1], "content"
        if isinstance(last[name], list):
            last, name = next(part for part in reversed(last[name]) if "text" in part), "text"
        continued, last[name] = last[name], last[name] + TAG
    pieces: list[str] = []
    deadline, left = time.thread_time() + SECONDS, MOST_CHARACTERS
    for piece in template.generate({_DEADLINE: deadline, "messages": messages, **variables}):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise ValueError(f"it writes more than {MOST_CHARACTERS} characters")
    text = "".join(pieces)
    if not goes_on:
        return text
    if not (continued.strip() in text and TAG.strip() in text and "content" in source):
        raise ValueError("it does not write the last message as it is")
    end = text.rindex(TAG.strip())
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


@functools.cache
def _compiler() -> Any:
    from jinja2.ext import Extension
    from jinja2.lexer import Token
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Clock(Extension):
        """Calls `__clock` in each iteration of a loop. Every call of a template checks the time."""

        def filter_stream(self, stream: Any) -> Any:
            last = opens = None
            for token in stream:
                if last == "block_begin":
                    opens = token.value
                yield token
                if token.type == "block_end" and opens == "for":
                    for kind, value in _CALL:
                        yield Token(token.lineno, kind, value)
                last = token.type

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(v) if hasattr(v, "__len__") else abs(v) for v in (left, right)]
            # The size of a power is its number of binary digits.
            digits = operator == "**" and isinstance(left, int) and left.bit_length()
            if (digits or sizes[0]) * sizes[1] > MOST_CHARACTERS:
                raise ValueError(f"it multiplies to more than {MOST_CHARACTERS}")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, what: Any, /, *args: Any, **kwargs: Any) -> Any:
            if time.thread_time() > context.parent[_DEADLINE]:
                raise ValueError(f"it takes more than {SECONDS:.0f} s of computing")
            return super().call(context, what, *args, **kwargs)

    class TemplateNamespace(Namespace):
        def __init__(self, /, *pairs: Any, **named: Any) -> None:
            super().__init__()
            for name, value in dict(*pairs, **named).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):  # Python would call some of these, outside of the sandbox.
                raise ValueError(f"a namespace has no {name}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    more = ["jinja2.ext.loopcontrols", Clock]
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=more)
    environment.globals |= {"__clock": lambda: "", "raise_exception": raise_exception}
    environment.globals["namespace"] = TemplateNamespace
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    return functools.lru_cache(environment.from_string)
