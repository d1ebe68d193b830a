"""Messages to token ids, by a checkpoint's chat template, a stranger's program. It runs in jinja's
sandbox, as transformers documents it, without the seconds that importing transformers takes. Its
memory and time are bounded, but for a single step whose operands do not show what it makes."""

import functools
import json
import re
import resource
import sys
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
LARGEST = 1 << 24
"""What a multiplication may give: a number, or the length of a string or list."""
WIDENING = frozenset(
    ("center", "expandtabs", "format", "indent", "ljust", "replace", "rjust", "zfill")
)
"""Methods and filters that make long texts of short ones."""
WIDE = re.compile(r"%[-+ #0-9.]*(\*|[0-9]{7})|\{[^}]*:[^}]*(\{|[0-9]{7})")
"""A format with a width that is large, or that is not known before."""
SECONDS, MEMORY_BYTES = 5.0, 1 << 30
"""Of one text: of this thread's processor, and beyond what the process had at its peak before."""
_GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation\b")
"""A block around what the assistant wrote, which trainers look for; `with` has its scope."""
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Where the text to be continued ends; a template may cut its space."""


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
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Return the token ids of messages, or of a text as the user's only one. Raises CheckpointError
    where the template fails or takes too much. chat: called with whether there are tools. settings:
    variables of the template, and "tools". check: called with the text that the template writes;
    may raise CheckpointError."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    try:
        source, special, encode = chat((settings or {}).get("tools") is not None)
        # Copies: objects may have methods that the sandbox does not know.
        messages, variables = json.loads(json.dumps([given, settings or {}], default=str))
        variables = {"tools": None, "documents": None, **special, **variables}
        variables["add_generation_prompt"] = ending == "answer"
        check(text := _rendered(source, messages, variables, ending == "continue"))
        return list(encode(text))
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
        given = {name: value for name, value in message.items() if value is not None}
        names = ("reasoning_content", "thinking", "reasoning")  # templates read the first two
        for thoughts in [given[name] for name in names if name in given][:1]:
            given = {"thinking": thoughts, **given, "reasoning_content": thoughts}
        messages[place] = given
    if goes_on:
        last, name = messages[-1], "content"
        if isinstance(last[name], list):
            last, name = next(each for each in reversed(last[name]) if "text" in each), "text"
        known, last[name] = last[name], last[name] + TAG
    before = sys.gettrace()
    sys.settrace(_watch(time.thread_time() + SECONDS, _peak_bytes() + MEMORY_BYTES))
    try:
        text: str = template.render(messages=messages, **variables)
    finally:
        sys.settrace(before)
    if not goes_on:
        return text
    if not (known.strip() in text and TAG.strip() in text and "content" in source):
        raise ValueError("it does not write the last message as it is")
    end = text.rindex(TAG.strip())
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


@functools.cache
def _compiler() -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_call("format" if operator == "%" else operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(what, "__name__", None)
            if name in WIDENING:
                # jinja wraps str.format.
                text = getattr(getattr(what, "__wrapped__", what), "__self__", None)
                _check_call(name, text, *args, *kwargs.values())
            return super().call(context, what, *args, **kwargs)

    class Namespace(jinja2.utils.Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):  # Python would call some of these, outside of the sandbox.
                raise ValueError(f"a namespace has no {name}")
            super().__setitem__(name, value)

    def namespace(*pairs: Any, **named: Any) -> Namespace:
        made = Namespace()
        for name, value in dict(*pairs, **named).items():
            made[name] = value
        return made

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    def tojson(value: Any, **form: Any) -> str:
        if not form.keys() <= {"ensure_ascii", "indent", "separators", "sort_keys"}:
            raise ValueError("tojson takes no other form")  # "default" would be called
        return json.dumps(value, **{"ensure_ascii": False, **form})

    more = ["jinja2.ext.loopcontrols"]
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=more)
    environment.globals |= {"namespace": namespace, "raise_exception": raise_exception}
    environment.globals["dict"] = lambda *pairs, **named: dict(*pairs, **named)
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    for name in WIDENING & environment.filters.keys():
        environment.filters[name] = _checked(name, environment.filters[name])
    return functools.lru_cache(environment.from_string)


def _checked(name: str, work: Any) -> Any:
    @functools.wraps(work)
    def run(*given: Any, **named: Any) -> Any:
        _check_call(name, *given, *named.values())
        return work(*given, **named)

    return run


def _check_call(name: str, *given: Any) -> None:
    """Raise ValueError where a call, or an operator, makes something large."""
    if name in ("*", "**"):
        sizes = [len(each) if hasattr(each, "__len__") else abs(each) for each in given]
        if name == "*":
            too_large = sizes[0] * sizes[1] > LARGEST
        else:
            too_large = sizes[0] > LARGEST or (sizes[0] > 1 and sizes[1] > LARGEST.bit_length())
    elif name == "format":
        too_large = isinstance(given[0], str) and WIDE.search(given[0]) is not None
    elif name == "replace":
        texts = [each for each in given if isinstance(each, str)]
        too_large = len(texts) == 3 and texts[0].count(texts[1]) * len(texts[2]) > LARGEST
    else:
        too_large = any(isinstance(each, int) and each > LARGEST for each in given)
    if too_large:
        raise ValueError(f"it asks for more than {LARGEST} of something")


def _watch(deadline: float, most_bytes: int) -> Any:
    """Return a function for sys.settrace that checks time and memory at every line."""

    def watch(frame: object, event: str, argument: object) -> Any:
        if time.thread_time() > deadline:
            raise ValueError(f"it takes more than {SECONDS:.0f} s of computing")
        if _peak_bytes() > most_bytes:
            raise ValueError(f"it takes more than {MEMORY_BYTES >> 20} MiB")
        return watch

    return watch


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
