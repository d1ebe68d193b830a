"""A prompt -> token ids."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..errors import PromptError
from .chat import Messages
from .tokenizer import Tokenizer

NO_PROMPT = 'a prompt is text, token ids, or messages, each {"role": ..., "content": ...}'
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | Messages,
    *,
    chat_template: bool,
    system_prompt: str | None = None,
    chat_settings: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt: text, messages of a chat, or ids, which stay as they are.

    chat_template: text is the user's message where there is a template; messages need one.
    system_prompt: the message before them. chat_settings: for the template. Raises PromptError for
    what is empty or neither of these, and for a system prompt or settings without a template.
    """
    if isinstance(prompt, bytes):
        raise PromptError("the prompt is bytes: decode them, a prompt is text")
    if not hasattr(prompt, "__len__"):
        raise PromptError(NO_PROMPT)
    if not (prompt.strip() if isinstance(prompt, str) else len(prompt)):
        raise PromptError("the prompt is empty: give some text")
    for text in (prompt, system_prompt):
        if isinstance(text, str) and HALF_A_CHARACTER.search(text):
            raise PromptError("a prompt has half a character in it, a lone surrogate: leave it out")
    messages = _messages(prompt) if chat_template or not isinstance(prompt, str) else None
    if messages is not None and tokenizer.has_chat_template:
        if system_prompt is not None:
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return tokenizer.apply_chat(messages, chat_settings)
    if system_prompt is not None or chat_settings:
        raise PromptError(
            "a system prompt and settings of a chat template need one, and "
            + ("this model has none" if messages else "token ids take none")
            + ": leave them out"
        )
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if messages is not None:
        raise PromptError("this model has no chat template: give the prompt as text")
    try:
        return [operator.index(cast(int, each)) for each in prompt]
    except TypeError:
        raise PromptError(NO_PROMPT) from None


def _messages(prompt: str | Sequence[int] | Messages) -> Messages | None:
    """A text as the user's only message, messages as they are, None for anything else."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if all(isinstance(each, Mapping) and each.keys() >= {"role", "content"} for each in prompt):
        return cast(Messages, prompt)
    return None
