"""Messages to token ids, by a checkpoint's chat template, a stranger's program. transformers runs
it in jinja's sandbox; here its memory and time are bounded too, but for a single step whose
operands do not show that it makes something huge."""

import functools
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ..errors import CheckpointError, OptionError, first_line

Messages = Sequence[Mapping[str, str]]
"""Each has "role" and "content"."""
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


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise OptionError for names that are not variables of a template."""
    for name in settings:
        if name in RESERVED:
            raise OptionError(f"chat-template-config may not set {name}: leave it out")


def apply(
    tokenizer: Any,
    prompt: str | Messages,
    settings: Settings = None,
    *,
    ending: Ending = "answer",
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Return the token ids of messages, or of a text as the user's only one. Raises CheckpointError
    where the template fails or takes too much. tokenizer: of transformers. settings: variables of
    the template, and "tools". check: called with the text that the template writes; may raise
    CheckpointError."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    try:
        from transformers.utils import chat_template_utils

        chat_template_utils.ImmutableSandboxedEnvironment = _bounded()  # type: ignore[attr-defined]
        text = tokenizer.apply_chat_template(
            messages,
            **(settings or {}),
            add_generation_prompt=ending == "answer",
            continue_final_message=ending == "continue",
            tokenize=False,
            return_dict=False,
        )
        check(text)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except CheckpointError:
        raise
    except Exception as problem:  # templates are programs and fail in their own ways
        raise CheckpointError(
            f"the chat template cannot be applied ({first_line(problem):.170}): use "
            "--no-chat-template"
        ) from None


@functools.cache
def _bounded() -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Template(jinja2.Template):
        def render(self, *args: Any, **kwargs: Any) -> str:
            before = sys.gettrace()
            sys.settrace(_watch(time.thread_time() + SECONDS, _peak_bytes() + MEMORY_BYTES))
            try:
                return super().render(*args, **kwargs)
            finally:
                sys.settrace(before)

    class Environment(ImmutableSandboxedEnvironment):
        template_class = Template
        intercepted_binops = frozenset(["*", "**", "%"])

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in WIDENING & self.filters.keys():
                self.filters[name] = _checked(name, self.filters[name])

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

    return Environment


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
