"""Messages -> token ids: by the model's chat template, by plain role prefixes, or as one source.

The role prefixes are those of mlx_lm.server, for models that know no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..engine.pair import Pair
from ..engine.prepare import encode
from ..models.t5.context import EncoderDecoderModel
from ..options import Options
from ..text.chat import Ending
from .body import Body
from .formats import calls_of
from .problems import unsupported, wrong

Way = Literal["template", "role prefixes", "single user message"]
Message = dict[str, Any]
PREFIXES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
KEPT = ("name", "tool_call_id", "reasoning_content")
"""Fields of a message that templates read beside role and content."""
THINKING = {"enabled": True, "disabled": False}
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn thinking on or off: the first is read by Qwen, GLM and others, the
second by DeepSeek, Granite and Kimi."""


def way_of(pair: Pair, options: Options) -> Way:
    """How this model reads messages."""
    if isinstance(pair.target, EncoderDecoderModel):
        return "single user message"
    templated = options.chat_template and pair.tokenizer.has_chat_template
    return "template" if templated else "role prefixes"


def messages_of(given: Sequence[Message]) -> list[Message]:
    """Convert the messages of a request to those of chat templates, whose contents are strings."""
    return [_message(each) for each in given]


def ending_of(body: Body, messages: Sequence[Message]) -> Ending:
    """Return how the prompt ends: add_generation_prompt and continue_final_message, as in vLLM.

    Raises Problem."""
    if not body.get("continue_final_message"):
        return "answer" if body.get("add_generation_prompt", True) else "closed"
    if messages[-1].get("tool_calls"):
        raise wrong(
            "continue_final_message cannot continue a message that calls tools",
            "continue_final_message",
        )
    return "continue"


def template_settings(body: Body) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template.

    Several kinds of clients have fields of their own that turn thinking on or off;
    chat_template_kwargs takes precedence over all of them."""
    thinks: bool | None = THINKING.get(body.get("thinking", {}).get("type"))
    told: dict[str, Any] = {}
    effort = body.get("reasoning_effort")
    if effort == "none":
        thinks = False
    elif effort:
        told["reasoning_effort"] = effort
    thinks = body.get("enable_thinking", thinks)
    if thinks is not None:
        told |= dict.fromkeys(SWITCHES, thinks)
    return {**told, **body.get("chat_template_kwargs", {})}


def _message(given: Message) -> Message:
    role = "system" if given["role"] == "developer" else given["role"]
    kept = {name: given[name] for name in KEPT if name in given}
    if role == "assistant" and given.get("tool_calls"):
        kept["tool_calls"] = calls_of(given["tool_calls"])
    return {"role": role, "content": text_of(given.get("content", "")), **kept}


def text_of(content: str | Sequence[Message]) -> str:
    """Return the text of a content: a string, or a list of text parts."""
    return content if isinstance(content, str) else "".join(each["text"] for each in content)


def ids_of(
    pair: Pair,
    messages: Sequence[Message],
    options: Options,
    settings: Mapping[str, Any],
    ending: Ending = "answer",
) -> list[int]:
    """Token ids up to where the model writes. settings: for the template, beside those of the
    options. Raises Problem, PromptError, CheckpointError."""
    if options.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system_prompt}, *messages]
    way = way_of(pair, options)
    if way == "template":
        more = {**options.chat_template_config, **settings}
        return pair.tokenizer.apply_chat(messages, more, ending=ending)
    if way == "role prefixes":
        return pair.tokenizer.encode(with_prefixes(messages, ending))
    if [each["role"] for each in messages] != ["user"]:
        raise wrong("this model takes a single message of the user", "messages")
    if ending != "answer":
        raise unsupported("continue_final_message", "this model cannot continue a message")
    return encode(pair, messages[0]["content"], options)


def with_prefixes(messages: Sequence[Message], ending: Ending = "answer") -> str:
    """A line for each message, and the beginning of the answer's."""
    lines = [PREFIXES.get(each["role"], "") + each["content"] for each in messages]
    if ending != "answer":
        return "\n".join(lines) + ("\n" if ending == "closed" else "")
    return "\n".join([*lines, PREFIXES["assistant"]]).rstrip()
