"""Input items and tools of OpenAI's Responses API, turned into the messages and tools of a chat.
Field names as in openai-python (types/responses) and codex-rs (protocol/src/models.rs)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..text.messages import log_once, text_of
from .bodies import Body, Boolean, ByType, Fields, Object, String
from .contents import Content, Other, Part
from .models import (
    LONGEST_TOOL_NAME,
    Generated,
    MaxTokens,
    Name,
    ObjectFormat,
    OneOf,
    Parameters,
    Penalty,
    Reasoning,
    SchemaFormat,
    Stop,
    Stops,
    StructuredOutputs,
    TextFormat,
)
from .settings import Limits

ENCRYPTED = "mlx-specdec reasoning: "
"""The beginning of the `encrypted_content` that this server writes for reasoning. The text of the
reasoning follows."""
ITEMS_READ: tuple[str, ...] = ("message", "reasoning", "function_call", "custom_tool_call")
ITEMS_READ += ("function_call_output", "custom_tool_call_output")
"""Types of items that are read. Others are skipped, because clients often add new types."""
RESPONSES_FIELDS = (
    *("model", "stream", "temperature", "top_p", "top_k", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "speculative", "parallel_tool_calls"),
    *("structured_outputs", "exact"),
)
"""Fields of a Responses request that have the same meaning in a chat completion."""
CUSTOM: Body = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a custom tool in the prompt. Custom tools have a text as input."""
SKIPPED = "skipped %s of the type %r, which this server does not know"


class MessageItem(Fields):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(Fields):
    type: Literal["reasoning"]
    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: String | None = None


class CallItem(Fields):
    name: String
    namespace: String | None = None
    call_id: String


class FunctionCall(CallItem):
    type: Literal["function_call"]
    arguments: String


class CustomCall(CallItem):
    type: Literal["custom_tool_call"]
    input: String


class CallOutput(Fields):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: String
    output: Content


ResponseItem = Annotated[
    Any,
    ByType(
        *(MessageItem, ReasoningItem, FunctionCall, CustomCall, CallOutput),
        fallback=Other,
        untyped=MessageItem,
        words="a message with role and content, or an item with a type and its fields",
    ),
]
TOOL_TYPES = ("function", "custom")


class CustomFormat(Fields):
    definition: String | None = None


class CallableTool(Fields):
    """A tool that the model can call."""

    type: Literal["function", "custom"]
    name: Name
    description: String | None = None
    parameters: Parameters | None = None
    format: CustomFormat | None = None


TOOL = "a tool with a type, such as a function with name and parameters"


class Namespace(Fields):
    type: Literal["namespace"]
    name: Name
    tools: list[Annotated[Any, ByType(CallableTool, fallback=Other, words=TOOL)]]


ResponseTool = Annotated[Any, ByType(CallableTool, Namespace, fallback=Other, words=TOOL)]


class CalledTool(Fields):
    type: Literal["function", "custom"]
    name: String
    namespace: String | None = None


class AllowedTools(Fields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[Any, ByType(CalledTool, fallback=Other, words=TOOL)]], Field(min_length=1)
    ]


ResponseChoice = Annotated[
    Any,
    ByType(
        *(CalledTool, AllowedTools),
        fallback=Other,
        word=OneOf,
        words='"none", "auto", "required", or a tool such as {"type": "function", "name": ...}',
    ),
]


class InputTokensRequest(Fields):
    """The body of /v1/responses/input_tokens."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {"conversation": (), "prompt": ()}
    model: String | None = None
    input: String | Annotated[list[ResponseItem], Field(min_length=1)]
    instructions: String | None = None
    previous_response_id: String | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=Limits.tools)] | None = None
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: Boolean | None = None
    reasoning: Reasoning | None = None


TEXT_FORMAT = ByType(
    *(TextFormat, ObjectFormat, SchemaFormat),
    words='of the type "text", "json_object" or "json_schema"',
)


class TextSettings(Fields):
    format: Annotated[Any, TEXT_FORMAT] | None = None


class ResponsesRequest(Generated, InputTokensRequest):
    """The body of /v1/responses."""

    same: ClassVar[Mapping[str, str]] = {"max_tokens": "max_output_tokens"}
    refused: ClassVar[Mapping[str, Sequence[object]]] = {
        **InputTokensRequest.refused,
        "background": (False,),
        "top_logprobs": (0,),
    }
    stop: Stop | Stops | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    structured_outputs: StructuredOutputs | None = None
    max_output_tokens: MaxTokens | None = None
    text: TextSettings | None = None
    include: list[String] | None = None
    store: Boolean | None = None
    metadata: Object | None = None
    user: String | None = None
    safety_identifier: String | None = None
    prompt_cache_key: String | None = None
    service_tier: String | None = None
    truncation: String | None = None


@dataclass(frozen=True)
class ToolName:
    """The client's name of a tool. custom: Whether the tool's input is a text instead of JSON."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def shown(self) -> str:
        """The name by which the model knows the tool."""
        space = "" if self.namespace is None else f"{self.namespace.rstrip('_')}__"
        return f"{space}{self.name}"[-LONGEST_TOOL_NAME:]


def items_of(body: Body) -> list[Body]:
    """Return the input of a request as items."""
    items = body["input"]
    return [{"role": "user", "content": items}] if isinstance(items, str) else list(items)


def as_chat(body: Body, items: Iterable[Body]) -> dict[str, Any]:
    """Return the fields of a chat completion that decide the prompt. items: The items of the
    conversation."""
    instructions = body.get("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        _add(messages, item)
    return {
        "messages": messages or [{"role": "user", "content": ""}],
        "tools": [_as_function(name, tool) for name, tool in named_tools(body).items()],
        "tool_choice": _tool_choice(body.get("tool_choice", "auto")),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": body.get("reasoning"),
    }


def _add(messages: list[dict[str, Any]], item: Body) -> None:
    """Add an item to messages. Consecutive items of the assistant become one message, so that the
    results of calls follow the message with the calls."""
    kind = item.get("type", "message")
    if kind == "message" and item["role"] != "assistant":
        messages.append({"role": item["role"], "content": text_of(item["content"])})
    elif kind in ITEMS_READ[-2:]:
        content = text_of(item["output"])
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind not in ITEMS_READ:
        log_once(SKIPPED, "an input item", kind[:LONGEST_TOOL_NAME])
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        turn = messages[-1]
        if kind in ("message", "reasoning"):
            field = "content" if kind == "message" else "reasoning_content"
            text = text_of(item["content"]) if kind == "message" else _reasoning(item)
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
    return text_of(item.get("content", ())) or text_of(item.get("summary", ()))


def named_tools(body: Body) -> dict[ToolName, Body]:
    """Return the tools that the model can call, including tools in namespaces."""
    found: dict[ToolName, Body] = {}
    for tool in body.get("tools", ()):
        space = tool["name"] if tool["type"] == "namespace" else None
        for inner in (tool,) if space is None else tool["tools"]:
            if inner["type"] in TOOL_TYPES:
                found[ToolName(inner["name"], space, inner["type"] == "custom")] = inner
            else:
                log_once(SKIPPED, "a tool", inner["type"][:LONGEST_TOOL_NAME])
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
        allowed = [_called(tool) for tool in choice["tools"] if tool["type"] in TOOL_TYPES]
        return {**choice, "allowed_tools": {"mode": choice["mode"], "tools": allowed}}
    return _called(choice) if choice["type"] in TOOL_TYPES else "auto"


def _called(choice: Body) -> Body:
    name = ToolName(choice["name"], choice.get("namespace"))
    return {"type": "function", "function": {"name": name.shown}}
