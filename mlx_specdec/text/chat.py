"""Token ids of the messages of a chat, by the checkpoint's chat template. Templates run in jinja's
sandbox, as transformers runs them, but without the seconds that importing transformers takes."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ..errors import CheckpointError, OptionError, first_line
from .sandbox import render

Messages = Sequence[Mapping[str, str]]
"""The messages of a chat, each with "role" and "content"."""
Settings = Mapping[str, Any] | None
Ending = Literal["answer", "continue", "closed"]
"""How a prompt ends: with the header of a new answer, with the last message left open for the model
to continue, or with the last message closed."""
Chat = tuple[str, Mapping[str, Any], Callable[[str], Sequence[int]]]
"""A template, the special tokens that it may name, and a function that encodes its output."""
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


def apply(
    chat: Callable[[bool], Chat],
    prompt: str | Messages,
    settings: Settings = None,
    *,
    ending: Ending = "answer",
) -> list[int]:
    """Return the token ids of messages.

    Args:
        chat: Returns the template. Its argument is whether there are tools.
        prompt: The messages, or the text of the only message.
        settings: Variables of the template, and "tools".
        ending: How the prompt ends.
    Raises:
        CheckpointError: If the template fails.
    """
    conversation = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    try:
        source, special, encode = chat((settings or {}).get("tools") is not None)
        # Copies, since objects may have methods that the sandbox does not know.
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
    """Return the text of messages. goes_on: Whether the last message is left open."""
    template = _GENERATION.sub(r"\1with", source)
    for place, message in enumerate(messages):
        filled = {name: value for name, value in message.items() if value is not None}
        if (thoughts := reasoning_of(filled)) is not None:
            filled = {"thinking": thoughts, **filled, "reasoning_content": thoughts}
            filled["thinking"] = filled["thinking"] or thoughts
        messages[place] = filled
    variables["messages"] = messages
    if not goes_on:
        return render(template, variables)
    continued = messages[-1]["content"]
    messages[-1]["content"] = continued + _CONTINUE_TAG
    text = render(template, variables)
    if not (continued.strip() in text and _CONTINUE_TAG.strip() in text and "content" in source):
        raise ValueError("it does not write the last message as it is")
    end = text.rindex(_CONTINUE_TAG.strip())
    return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()
