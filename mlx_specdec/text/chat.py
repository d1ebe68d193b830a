"""Messages -> token ids, by a checkpoint's chat template, which is a program of a stranger's.

transformers runs it in jinja's sandbox, which keeps it from files and leaves it all of the memory
and time; here both are bounded. A single step that makes one huge string of literals of its own
gets through, where its numbers do not say so.
"""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError, OptionError, first_line

Messages = Sequence[Mapping[str, str]]
"""Each has "role" and "content"."""
FIXED = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
LARGEST = 1 << 24
"""What a multiplication may give: a number, or the length of a string or list."""
SECONDS, MEMORY_BYTES = 5.0, 1 << 30
"""Of one text: of this thread's processor, and beyond what the process had at its peak before."""


class TemplateError(ValueError):
    """A template asks for more than any chat needs."""


def apply(
    tokenizer: Any, prompt: str | Messages, settings: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of messages, or of a text as one of the user's, up to where the answer begins.

    tokenizer: of transformers. settings: variables that the template may ask for. Raises
    CheckpointError where the template fails or takes too much, OptionError for settings that are
    not the caller's.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    asked = settings or {}
    for name in ("conversation", *FIXED):
        if name in asked:
            raise OptionError(f"chat-template-config may not set {name}: leave it out")
    try:
        from transformers.utils import chat_template_utils

        chat_template_utils.ImmutableSandboxedEnvironment = _bounded()  # type: ignore[attr-defined]
        return list(tokenizer.apply_chat_template(messages, **asked, **FIXED))
    except Exception as problem:  # templates are programs and fail in their own ways
        raise CheckpointError(
            f"the chat template cannot be applied ({first_line(problem):.200}): use "
            "--no-chat-template"
        ) from None


@functools.cache
def _bounded() -> Any:
    """jinja's sandbox with bounds."""
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
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    return Environment


def _check_product(operator: str, left: Any, right: Any) -> None:
    sizes = [len(each) if hasattr(each, "__len__") else abs(each) for each in (left, right)]
    if operator == "**":
        too_large = (sizes[0] > 1 and sizes[1] > LARGEST.bit_length()) or sizes[0] > LARGEST
    else:
        too_large = sizes[0] * sizes[1] > LARGEST
    if too_large:
        raise TemplateError(f"it asks for more than {LARGEST} of something")


def _watch(deadline: float, most_bytes: int) -> Any:
    """For sys.settrace, which is of this thread alone: looks at every line of the template."""

    def watch(frame: object, event: str, argument: object) -> Any:
        if time.thread_time() > deadline:
            raise TemplateError(f"it takes more than {SECONDS:.0f} s of computing")
        if _peak_bytes() > most_bytes:
            raise TemplateError(f"it takes more than {MEMORY_BYTES >> 20} MiB")
        return watch

    return watch


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
