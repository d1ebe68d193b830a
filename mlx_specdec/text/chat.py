"""Token ids of the messages of a chat, by the checkpoint's chat template. Templates run in jinja's
sandbox, as transformers runs them, but without the seconds that importing transformers takes. The
sandbox has limits of processor time and of sizes, since a template is a program by a stranger. A
single operation, such as `10 ** 10 ** 8`, could run for hours."""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, Literal

from ..errors import OptionError

Messages = Sequence[Mapping[str, str]]
"""The messages of a chat, each with "role" and "content"."""
Settings = Mapping[str, Any] | None
Ending = Literal["answer", "continue", "closed"]
"""How a prompt ends: with the header of a new answer, with the last message left open for the model
to continue, or with the last message closed."""
_RESERVED = (
    "add_generation_prompt chat_template continue_final_message conversation documents max_length "
    "messages padding return_assistant_tokens_mask return_dict return_tensors self tokenize "
    "sanitize_control_tokens tokenizer_kwargs tools truncation"
)
RESERVED = frozenset(_RESERVED.split())
"""Names that are parameters of transformers' apply_chat_template, and cannot be variables."""
_GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation\b")
"""A block around the assistant's text, for trainers. It has the scope of a `with` block."""
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the text to continue. A template may strip its space."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with the reasoning of a message. Templates read the first or the second."""
MOST_CHARACTERS, MOST_SECONDS = 1 << 24, 5.0
"""Limits of one rendering: characters of the output or of any text, items of any list, and seconds
of processor time."""
MOST_WIDTH = 1 << 12
"""Limit of the width of padding, and of the bits of an integer."""
_DEADLINE = " deadline"
"""A variable that no template can name: the thread's processor time at which rendering ends."""
_PADDING = {
    *("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "zfill"),
}
"""Filters and methods of texts whose integer arguments are widths."""
_FIELD = re.compile(r"%%|%(?:\(.*?\))?[-+ #.*\d]*")
"""A field of a form for the operator %, without its letter."""


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of a message: the first text that is not empty, "" if all are empty, and
    None if no field has a text."""
    texts = [message[name] for name in _THOUGHTS if message.get(name) is not None]
    return next(filter(None, texts), "" if texts else None)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise OptionError for names that are not variables of a template."""
    for name in settings:
        if name in RESERVED:
            raise OptionError(f"chat-template-config may not set {name}: leave it out")


def render(source: str, messages: Any, variables: dict[str, Any], ending: Ending) -> str:
    """Return the text of messages. Raises ValueError beyond a limit, and the errors of templates,
    which are programs and fail in their own ways."""
    template = _compiler()(_GENERATION.sub(r"\1with", source))
    for place, message in enumerate(messages):
        filled = {name: value for name, value in message.items() if value is not None}
        if (thoughts := reasoning_of(filled)) is not None:
            filled = {"thinking": thoughts, **filled, "reasoning_content": thoughts}
            filled["thinking"] = filled["thinking"] or thoughts
        messages[place] = filled
    variables |= {"messages": messages, "add_generation_prompt": ending == "answer"}
    variables[_DEADLINE] = time.thread_time() + MOST_SECONDS
    if ending != "continue":
        return str(template.render(variables))
    continued = messages[-1]["content"]
    messages[-1]["content"] = continued + _CONTINUE_TAG
    text = str(template.render(variables))
    if not (continued.strip() in text and _CONTINUE_TAG.strip() in text and "content" in source):
        raise ValueError("it does not write the last message as it is")
    end = text.rindex(_CONTINUE_TAG.strip())
    return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()


def _check_time(context: Any) -> None:
    if time.thread_time() > context.parent[_DEADLINE]:
        raise ValueError(f"it takes more than {MOST_SECONDS:.0f} s of computing")


def _check_length(length: int) -> None:
    if length > MOST_CHARACTERS:
        raise ValueError(f"it makes a text or list of more than {MOST_CHARACTERS} characters")


def _check_widths(numbers: Iterable[Any]) -> None:
    for number in numbers:
        if isinstance(number, int) and number > MOST_WIDTH:
            raise ValueError(f"it uses a width above {MOST_WIDTH}, or an integer of more bits")


def _bounded(value: Any) -> Any:
    """Return a value. Raises ValueError if it is too large."""
    if isinstance(value, int):
        _check_widths([value.bit_length()])
    elif isinstance(value, Sized):
        _check_length(len(value))
    return value


def _called(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a filter or a method. Raises ValueError if its result is too large, or an argument after
    the first one too wide."""
    if name in _PADDING:
        _check_widths((*args[1:], *kwargs.values()))
    return _bounded(function(*args, **kwargs))


@functools.cache
def _compiler() -> Callable[[str], Any]:
    """Return the function that compiles templates."""
    from jinja2 import nodes, pass_context, sandbox
    from jinja2.compiler import CodeGenerator

    class Generator(CodeGenerator):
        """Adds checks to loops and to the operator ~, which the sandbox does not see."""

        def visit_For(self, node: Any, frame: Any) -> None:
            function = nodes.EnvironmentAttribute("timed")
            node.iter = nodes.Call(function, [node.iter], [], None, None)
            super().visit_For(node, frame)

        def visit_Concat(self, node: Any, frame: Any) -> None:
            self.write("concat((")
            super().visit_Concat(node, frame)
            self.write(",))")

    class Formatter(sandbox.SandboxedFormatter):
        """Formats texts for str.format."""

        def format_field(self, value: Any, format_spec: str) -> Any:
            _check_widths(map(int, re.findall(r"\d+", format_spec)))
            return super().format_field(value, format_spec)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        """A sandbox that checks the time and sizes at every call and operator."""

        code_generator_class = Generator
        intercepted_binops = frozenset(["+", "*", "**", "%"])

        @staticmethod
        def concat(pieces: Iterable[str]) -> str:
            """Return the text of a template, a block, a macro, or the operator ~."""
            written, length = [], 0
            for piece in pieces:
                written.append(piece)
                length += len(piece)
                _check_length(length)
            return "".join(written)

        @staticmethod
        @pass_context
        def timed(context: Any, values: Iterable[Any]) -> Iterator[Any]:
            for value in values:
                _check_time(context)
                yield value

        def call(self, context: Any, what: Any, /, *args: Any, **kwargs: Any) -> Any:
            _check_time(context)
            name = getattr(what, "__name__", "")
            return _called(name, super().call, context, what, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and isinstance(left, str):
                fields = "".join(_FIELD.findall(left))
                _check_widths(map(int, re.findall(r"\d+", fields)))
                # A star takes its width from the values.
                _check_widths(right if "*" in fields else ())
            elif operator == "*" and isinstance(left, Sized):
                _check_length(len(left) * right)
            elif operator == "*" and isinstance(right, Sized):
                _check_length(len(right) * left)
            elif operator == "**" and isinstance(left, int) and isinstance(right, int):
                _check_widths([left.bit_length() * right])
            return _bounded(super().call_binop(context, operator, left, right))

        def wrap_str_format(self, value: Any) -> Any:
            if super().wrap_str_format(value) is None:
                return None
            form, mapped = value.__self__, value.__name__ == "format_map"
            vformat = Formatter(self).vformat
            return lambda *args, **names: vformat(form, args, args[0] if mapped else names)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    def format(form: Any, *args: Any, **kwargs: Any) -> Any:
        return environment.call_binop(None, "%", str(form), kwargs or args)

    def tojson(value: Any, *args: Any, **kwargs: Any) -> str:
        options = zip(("ensure_ascii", "indent", "separators", "sort_keys"), args, strict=False)
        return json.dumps(value, **{"ensure_ascii": False, **dict(options), **kwargs})

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    for name, function in (environment.filters | {"format": format, "tojson": tojson}).items():
        bounded = functools.partial(_called, name, function)
        environment.filters[name] = functools.update_wrapper(bounded, function)
    return functools.lru_cache(environment.from_string)
