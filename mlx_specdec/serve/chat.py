"""Messages -> token ids: by the model's chat template, by plain role prefixes, or as one source.

The role prefixes are those of mlx_lm.server, for models that know no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..models.encoder_decoder import EncoderDecoderModel
from ..options import Options
from ..pair import Pair
from ..prepare import encode
from ..text.chat import Ending
from . import body as fields
from .body import Body
from .problems import unsupported, wrong
from .tools import calls_of

Way = Literal["template", "role prefixes", "single user message"]
Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
PREFIXES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
KEPT = ("name", "tool_call_id", "reasoning_content")
"""Fields of a message that templates read beside role and content."""
THINKING = {"enabled": True, "disabled": False}
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates are told whether to think: of Qwen, GLM and others, and of DeepSeek,
Granite and Kimi."""


def way_of(pair: Pair, options: Options) -> Way:
    """How this model reads messages."""
    if isinstance(pair.target, EncoderDecoderModel):
        return "single user message"
    templated = options.chat_template and pair.tokenizer.has_chat_template
    return "template" if templated else "role prefixes"


def messages_of(given: object) -> list[Message]:
    """Messages of a request, checked, with texts as contents. Raises Problem."""
    if not isinstance(given, list) or not given:
        raise wrong('messages must be a list of {"role": ..., "content": ...}', "messages")
    return [_message(each, f"messages[{at}]") for at, each in enumerate(given)]


def ending_of(body: Body, messages: Sequence[Message]) -> Ending:
    """How a prompt ends, by vLLM's fields. Raises Problem."""
    opens = "add_generation_prompt" not in body or fields.truth(body, "add_generation_prompt")
    if not fields.truth(body, "continue_final_message"):
        return "answer" if opens else "closed"
    if opens and "add_generation_prompt" in body:
        raise wrong(
            "a message is continued or a new one is begun: set one of continue_final_message and "
            "add_generation_prompt to false",
            "continue_final_message",
        )
    if messages[-1].get("tool_calls"):
        raise wrong(
            "continue_final_message cannot continue a message that calls tools",
            "continue_final_message",
        )
    return "continue"


def template_settings(body: Body) -> dict[str, Any]:
    """The variables of the chat template that a request sets: how much to think, by the fields of
    several kinds of clients, and chat_template_kwargs, which comes first. Raises Problem."""
    thinks: bool | None = None
    told: dict[str, Any] = {}
    thinking = fields.object_of(body, "thinking")
    kind = thinking.get("type") if thinking else "adaptive"
    if kind not in ("adaptive", *THINKING):
        raise unsupported("thinking", "thinking must be of the type enabled, disabled or adaptive")
    if kind != "adaptive":
        thinks = THINKING[kind]
    effort = fields.text(body, "reasoning_effort")
    if effort == "none":
        thinks = False
    elif effort:
        told["reasoning_effort"] = effort
    if "enable_thinking" in body:
        thinks = fields.truth(body, "enable_thinking")
    if thinks is not None:
        told |= dict.fromkeys(SWITCHES, thinks)
    return {**told, **fields.object_of(body, "chat_template_kwargs")}


def _message(given: object, where: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise wrong(f"{where} must have a role, one of {', '.join(ROLES)}", "messages")
    role = "system" if given["role"] == "developer" else given["role"]
    content = given.get("content")
    if content is None and role == "assistant":
        content = ""
    kept = {name: _kept(name, given[name], where) for name in KEPT if given.get(name) is not None}
    if role == "assistant" and given.get("tool_calls"):
        kept["tool_calls"] = calls_of(given["tool_calls"], where)
    return {"role": role, "content": text_of(content, "messages", where), **kept}


def _kept(name: str, value: object, where: str) -> object:
    if not isinstance(value, str):
        raise wrong(f"the {name} of {where} must be a string", "messages")
    return value


def text_of(content: object, field: str, where: str = "") -> str:
    """A content, which is a text or a list of parts that are text. Raises Problem."""
    where = where or field
    if isinstance(content, list):
        return "".join(_part(each, field, where) for each in content)
    if not isinstance(content, str):
        raise wrong(f"the content of {where} must be a string, or parts of text", field)
    return content


def _part(given: object, field: str, where: str) -> str:
    told = given.get("text") if isinstance(given, dict) and given.get("type") == "text" else None
    if not isinstance(told, str):
        raise wrong(
            f"{where} has a part that is no text: this server reads text alone",
            field,
            "unsupported_parameter",
        )
    return told


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
