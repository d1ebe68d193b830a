"""Input items and tools of OpenAI's Responses API, turned into the messages and tools of a chat.
Field names as in openai-python (types/responses) and codex-rs (protocol/src/models.rs)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..text.messages import lines_of, log_once
from .body import (
    OBJECT,
    TEXT,
    TRUTH,
    Body,
    Schema,
    either,
    fields,
    named,
    off,
    same_as,
    several,
    typed,
)
from .fields import ANTHROPIC_FORMAT, MAX_TOKENS, NAME, PARAMETERS

ENCRYPTED = "mlx-specdec reasoning: "
"""How `encrypted_content` of reasoning begins that this server wrote; the rest is the text."""
ITEMS: tuple[str, ...] = ("message", "reasoning", "function_call", "custom_tool_call")
ITEMS += ("function_call_output", "custom_tool_call_output")
"""Types of items that are read; others are skipped, since clients have more every month."""
SAME: tuple[str, ...] = ("model", "stream", "temperature", "top_p", "top_k", "seed", "stop")
SAME += ("presence_penalty", "frequency_penalty", "speculative", "parallel_tool_calls")
SAME += ("structured_outputs",)
"""Fields that a chat completion has as well."""
CUSTOM: Schema = {**OBJECT, "properties": {"input": TEXT}, "required": ["input"]}
"""Parameters of a custom tool, whose input is a text, as the model sees them."""
LONGEST_NAME = 64
SKIPPED = "skipped %s of the type %r, which this server does not know"


def _other(*known: str) -> Schema:
    """Return the schema of an object of another type than these."""
    return fields("type", type={**TEXT, "pattern": rf"^(?!({'|'.join(known)})$)"})


PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
PART = either(
    *(typed(each, "text", text=TEXT) for each in PARTS[:-1]),
    typed("refusal", "refusal", refusal=TEXT),
    _other(*PARTS),
    description="a part with a type, such as input_text with a text",
)
CONTENT = either(TEXT, several(PART))
CALLING = "name namespace call_id"
ITEM = either(
    fields(
        "role content",
        type={"enum": ["message"]},
        role={"enum": ["user", "assistant", "system", "developer"]},
        content=CONTENT,
    ),
    typed("reasoning", "", **named("summary content", several(PART)), encrypted_content=TEXT),
    typed("function_call", "name arguments call_id", **named(f"arguments {CALLING}", TEXT)),
    typed("custom_tool_call", "name input call_id", **named(f"input {CALLING}", TEXT)),
    *(typed(each, "call_id output", call_id=TEXT, output=CONTENT) for each in ITEMS[-2:]),
    _other(*ITEMS),
    description="a message with role and content, or an item with a type and its fields",
)
KINDS = ("function", "custom")
CALLABLE = fields(
    "type name",
    type={"enum": list(KINDS)},
    name=NAME,
    description=TEXT,
    parameters=PARAMETERS,
    format=fields(definition=TEXT),
)
TOOL = either(
    CALLABLE,
    typed("namespace", "name tools", name=NAME, tools=several(either(CALLABLE, _other(*KINDS)))),
    _other(*KINDS, "namespace"),
    description="a tool with a type, such as a function with name and parameters",
)
CALLED = fields("type name", type={"enum": list(KINDS)}, **named("name namespace", TEXT))
ALLOWED = several(either(CALLED, _other(*KINDS)), 1)
TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required"]},
    CALLED,
    typed("allowed_tools", "mode tools", mode={"enum": ["auto", "required"]}, tools=ALLOWED),
    _other(*KINDS, "allowed_tools"),
)


def requests(chat: Mapping[str, Schema], most_tools: int) -> dict[str, Schema]:
    """Return the schemas of bodies for /v1/responses by name. chat: the fields of a chat."""
    prompt: dict[str, Schema] = {
        "model": chat["model"],
        "input": either(TEXT, several(ITEM, 1)),
        **named("instructions previous_response_id", TEXT),
        "tools": several(TOOL, 0, most_tools),
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": TRUTH,
        "reasoning": fields(effort=TEXT),
        **named("conversation prompt", off()),
    }
    answer = {
        **{name: chat[name] for name in SAME},
        "max_output_tokens": MAX_TOKENS,
        "max_tokens": same_as("max_output_tokens", MAX_TOKENS),
        "text": fields(format=either(typed("text"), typed("json_object"), ANTHROPIC_FORMAT)),
        "include": several(TEXT),
        "store": TRUTH,
        "metadata": OBJECT,
        **named("user safety_identifier prompt_cache_key service_tier truncation", TEXT),
        "background": off(False),
        "top_logprobs": off(0),
    }
    return {
        "ResponsesRequest": fields("input", **{**answer, **prompt}),
        "InputTokensRequest": fields("input", **prompt),
    }


@dataclass(frozen=True)
class ToolName:
    """How a client names a tool. custom: its input is a text instead of JSON."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def shown(self) -> str:
        """The name by which the model knows the tool."""
        space = "" if self.namespace is None else f"{self.namespace.rstrip('_')}__"
        return f"{space}{self.name}"[-LONGEST_NAME:]


def items_of(body: Body) -> list[Body]:
    """Return the input of a request as items."""
    given = body["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


def as_chat(body: Body, items: Iterable[Body]) -> dict[str, Any]:
    """Return what makes the prompt, as fields of a chat completion. items: of the conversation."""
    instructions = body.get("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        _add(messages, item)
    return {
        "messages": messages or [{"role": "user", "content": ""}],
        "tools": [_as_function(name, tool) for name, tool in named_tools(body).items()],
        "tool_choice": _tool_choice(body.get("tool_choice", "auto")),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning_effort": body.get("reasoning", {}).get("effort"),
    }


def _add(messages: list[dict[str, Any]], item: Body) -> None:
    """Add an item to messages. What the assistant says, thinks and calls without anybody else in
    between is one message, so that results follow the message with their calls."""
    kind = item.get("type", "message")
    if kind == "message" and item["role"] != "assistant":
        messages.append({"role": item["role"], "content": _text(item["content"])})
    elif kind in ITEMS[-2:]:
        content = _text(item["output"])
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind not in ITEMS:
        log_once(SKIPPED, "an input item", kind[:LONGEST_NAME])
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        turn = messages[-1]
        if kind in ("message", "reasoning"):
            field = "content" if kind == "message" else "reasoning_content"
            text = _text(item["content"]) if kind == "message" else _reasoning(item)
            turn[field] = "\n".join(filter(None, [turn.get(field), text]))
        else:
            custom = kind == "custom_tool_call"
            name = ToolName(item["name"], item.get("namespace"), custom)
            arguments = {"input": item["input"]} if custom else item["arguments"]
            function = {"name": name.shown, "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})


def _reasoning(item: Body) -> str:
    encrypted = item.get("encrypted_content", "")
    if encrypted.startswith(ENCRYPTED):
        return str(encrypted[len(ENCRYPTED) :])
    return _text(item.get("content", ())) or _text(item.get("summary", ()))


def _text(content: str | Sequence[Body]) -> str:
    """Return the text of a content. What is no text is named: refusing it would end a conversation
    whose client sends the whole history again."""
    if isinstance(content, str):
        return content
    return lines_of(
        each["text" if kind != "refusal" else kind]
        if (kind := each["type"]) in PARTS
        else f"[{kind[:LONGEST_NAME]} left out: this model reads only text]"
        for each in content
    )


def named_tools(body: Body) -> dict[ToolName, Body]:
    """Return the tools that the model can call, those in namespaces included."""
    found: dict[ToolName, Body] = {}
    for tool in body.get("tools", ()):
        space = tool["name"] if tool["type"] == "namespace" else None
        for each in (tool,) if space is None else tool["tools"]:
            if each["type"] in KINDS:
                found[ToolName(each["name"], space, each["type"] == "custom")] = each
            else:
                log_once(SKIPPED, "a tool", each["type"][:LONGEST_NAME])
    return found


def _as_function(name: ToolName, tool: Body) -> dict[str, Any]:
    function = {"name": name.shown, "description": tool.get("description")}
    if not name.custom:
        return {"function": {**function, "parameters": tool.get("parameters")}}
    if grammar := tool.get("format", {}).get("definition"):
        text = f"{function['description'] or ''}\n\nThe input follows this grammar:\n{grammar}"
        function["description"] = text.strip()
    return {"function": {**function, "parameters": CUSTOM}}


def _tool_choice(choice: str | Body) -> object:
    if isinstance(choice, str):
        return choice
    if choice["type"] == "allowed_tools":
        allowed = [_called(each) for each in choice["tools"] if each["type"] in KINDS]
        return {**choice, "allowed_tools": {"mode": choice["mode"], "tools": allowed}}
    return _called(choice) if choice["type"] in KINDS else "auto"


def _called(choice: Body) -> Body:
    name = ToolName(choice["name"], choice.get("namespace"))
    return {"type": "function", "function": {"name": name.shown}}
