"""Token ids of the messages of a chat, by the checkpoint's chat template, which transformers
renders."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..errors import CheckpointError, OptionError, first_line

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
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with the reasoning of a message. Templates read the first or the second."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise OptionError for names that are not variables of a template."""
    for name in settings:
        if name in RESERVED:
            raise OptionError(f"chat-template-config may not set {name}: leave it out")


def apply(
    tokenizer: Any, prompt: str | Messages, settings: Settings = None, *, ending: Ending = "answer"
) -> list[int]:
    """Return the token ids of messages.

    Args:
        tokenizer: The tokenizer of transformers, with a chat template.
        prompt: The messages, or the text of the only message.
        settings: Variables of the template, and "tools".
        ending: How the prompt ends.
    Raises:
        CheckpointError: If the template fails.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for place, message in enumerate(messages):
        for thoughts in [message[name] for name in _THOUGHTS if message.get(name) is not None][:1]:
            messages[place] = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    ways = {
        "add_generation_prompt": ending == "answer",
        "continue_final_message": ending == "continue",
    }
    try:
        return list(
            tokenizer.apply_chat_template(messages, return_dict=False, **ways, **(settings or {}))
        )
    except Exception as problem:  # templates are programs and fail in their own ways
        raise CheckpointError(
            f"the chat template cannot be applied ({first_line(problem):.170}): use "
            "--no-chat-template"
        ) from None
