"""Anthropic's Messages API. A request is translated into a chat of OpenAI's API."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..results import Step
from ..text.messages import text_of
from .answer_models import CountAnswer, MessageAnswer
from .answers import Choice, Payload, Writer
from .bodies import Body, Boolean, ByType, Fields, Object, String, worded
from .contents import CONTENT_PARTS, Content, Other
from .events import Arguments, Call, Event, joined
from .models import (
    LONGEST_TOOL_NAME,
    ChatRequest,
    Generated,
    MaxTokens,
    Name,
    Parameters,
    Role,
    SchemaFormat,
    Stops,
    Thinking,
)
from .problems import Problem
from .requests import ParsedRequest, RequestParser
from .service import Endpoint
from .settings import Limits

MESSAGES_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "speculative"),
    "exact",
)
"""Fields that a chat completion of OpenAI's API has as well."""
FUNCTION = {"name": "name", "description": "description", "parameters": "input_schema"}
"""Names of the fields of Anthropic's tools, by the names of the fields of OpenAI's functions."""
TOOL_CHOICES: Mapping[object, object] = {"auto": "auto", "any": "required", "none": "none"}
ANTHROPIC_ERRORS = {404: "not_found_error", 413: "request_too_large"}
ANTHROPIC_ERRORS |= {500: "api_error", 503: "overloaded_error"}
"""Anthropic's names of errors, by status, if they differ from OpenAI's names."""
STOP_REASONS = {"eos": "end_turn", "stop": "stop_sequence"}
"""Anthropic's names of finish reasons. All other reasons are "max_tokens"."""
EMPTY_TEXT: Payload = {"type": "text", "text": "", "citations": None}
EMPTY_THINKING: Payload = {"type": "thinking", "thinking": "", "signature": ""}
BLOCKS = {"content": EMPTY_TEXT, "reasoning": EMPTY_THINKING}
"""The empty block of each kind. Deltas are named after the block's type."""
UNUSED_COUNTS: Payload = dict.fromkeys(
    ("cache_creation", "inference_geo", "server_tool_use", "service_tier")
)
"""Fields of a usage that Anthropic's schema requires, and that have no meaning here."""


class TextSource(Fields):
    type: Literal["text"]
    data: String


class ContentSource(Fields):
    type: Literal["content"]
    content: Content


SOURCE = ByType(TextSource, ContentSource, fallback=Other, words="a source with a type")


class Document(Fields):
    type: Literal["document"]
    title: String | None = None
    context: String | None = None
    source: Annotated[Any, SOURCE]


class SearchResult(Fields):
    type: Literal["search_result"]
    source: String
    title: String
    content: Content


RESULT = "a part of the result with a type, such as text"
ResultPart = Annotated[
    Any, ByType(*CONTENT_PARTS, Document, SearchResult, fallback=Other, words=RESULT)
]


class ToolUse(Fields):
    type: Literal["tool_use"]
    id: String | None = None
    name: String
    input: Object | None = None


class ToolResult(Fields):
    type: Literal["tool_result"]
    tool_use_id: String | None = None
    content: String | list[ResultPart] | None = None


Block = Annotated[
    Any,
    ByType(
        *(*CONTENT_PARTS, Document, SearchResult, ToolUse, ToolResult),
        fallback=Other,
        words="a block with a type, such as text",
    ),
]


class BlocksMessage(Fields):
    role: Role
    content: String | list[Block]


class CustomTool(Fields):
    type: Literal["custom"] | None = None
    name: Name
    description: String | None = None
    input_schema: Parameters | None = None


class ServersTool(Fields):
    """A tool that runs on Anthropic's servers, such as web_search_20250305."""

    type: Annotated[String, Field(pattern="_[0-9]{8}$")]


class AnyChoice(Fields):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: Boolean | None = None


class ToolChoice(Fields):
    type: Literal["tool"]
    name: String
    disable_parallel_tool_use: Boolean | None = None


class CountRequest(Fields):
    """The body of /v1/messages/count_tokens."""

    model: String | None = None
    system: Content | None = None
    messages: Annotated[list[BlocksMessage], Field(min_length=1)]
    tools: (
        Annotated[
            list[
                Annotated[
                    CustomTool | ServersTool,
                    worded(
                        'a tool such as {"name": ..., "input_schema": ...} with a name of at most '
                        f"{LONGEST_TOOL_NAME} letters, digits, underscores, dots and dashes"
                    ),
                ]
            ],
            Field(max_length=Limits.tools),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[
            AnyChoice | ToolChoice,
            worded('of the type "auto", "any", "none", or "tool" with a name', inside=True),
        ]
        | None
    ) = None
    thinking: Thinking | None = None


class OutputConfig(Fields):
    format: SchemaFormat | None = None


class MessagesRequest(Generated, CountRequest):
    """The body of /v1/messages."""

    same: ClassVar[Mapping[str, str]] = {"stop_sequences": "stop"}
    refused: ClassVar[Mapping[str, Sequence[object]]] = {"container": (), "mcp_servers": ([],)}
    max_tokens: MaxTokens
    stop_sequences: Stops | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None


def count_tokens(parser: RequestParser, body: Body) -> Payload:
    """Count the tokens of a checked body for /v1/messages/count_tokens. Raises Problem."""
    return {"input_tokens": len(parser.chat_ids(ChatRequest.read(_as_chat(body))))}


def _as_chat(body: Body) -> dict[str, Any]:
    """Return the fields of a chat completion that decide the prompt."""
    messages = [part for message in body["messages"] for part in _messages_of(message)]
    if "system" in body:
        messages = [{"role": "system", "content": body["system"]}, *messages]
    last = messages[-1]
    # A last message of the assistant is the beginning of the answer.
    begun = last["role"] == "assistant" and text_of(last["content"]) and not last.get("tool_calls")
    return {
        "messages": messages,
        "tools": [
            {"function": {name: tool.get(field) for name, field in FUNCTION.items()}}
            for tool in body.get("tools", ())
            if tool.get("type", "custom") == "custom"  # others run on Anthropic's servers
        ],
        **_tool_choice(body.get("tool_choice", {})),
        "thinking": body.get("thinking"),
        "continue_final_message": bool(begun),
    }


def _tool_choice(choice: Body) -> Body:
    if not choice:
        return {}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return {
        "tool_choice": TOOL_CHOICES.get(choice["type"], named),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
    }


def _messages_of(message: Body) -> list[dict[str, Any]]:
    """Return a message in OpenAI's format. Results of tools come first, each as a message."""
    blocks = message["content"]
    if isinstance(blocks, str):
        return [dict(message)]
    of_type: dict[str, list[Body]] = {}
    for block in blocks:
        of_type.setdefault(block["type"], []).append(block)
    results = []
    for block in of_type.get("tool_result", ()):
        content = block.get("content", "")
        content = content if isinstance(content, str) else [*map(_part, content)]
        id = block.get("tool_use_id")
        results.append({"role": "tool", "content": content, "tool_call_id": id})
    if results and of_type.keys() == {"tool_result"}:
        return results
    apart = ("tool_result", "tool_use")
    parts = [_part(block) for block in blocks if block["type"] not in apart]
    rest: dict[str, Any] = {**message, "content": parts or ""}
    for block in of_type.get("tool_use", ()):
        function = {"name": block["name"], "arguments": block.get("input")}
        rest.setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
    return [*results, rest]


def _part(block: Body) -> Body:
    """Return the part of a content for a block. Documents of text and results of a search become
    text."""
    if block["type"] == "search_result":
        lines = [block["title"], block["source"], text_of(block["content"])]
    elif block["type"] == "document" and block["source"]["type"] in ("text", "content"):
        source = block["source"]
        text = text_of(source["data" if source["type"] == "text" else "content"])
        lines = [block.get("title"), block.get("context"), text]
    else:
        return block
    return {"type": "text", "text": "\n".join(filter(None, lines)) + "\n"}


class MessagesWriter(Writer):
    """The wire format of messages, which have one choice."""

    named = True
    _block = -1
    _open: object = None

    def parse(self, body: Body) -> ParsedRequest:
        chat = {name: body[name] for name in MESSAGES_FIELDS if name in body} | _as_chat(body)
        # The field `effort` of output_config is only a hint.
        answer_format = body.get("output_config", {}).get("format") or body.get("output_format")
        chat["response_format"] = answer_format
        return self.parser.chat(ChatRequest.read(chat))

    @staticmethod
    def error(problem: Problem) -> tuple[int, Payload]:
        error = {
            "type": ANTHROPIC_ERRORS.get(problem.status, problem.type),
            "message": problem.message,
        }
        return problem.status, {"type": "error", "error": error}

    def silence(self) -> list[Payload]:
        return [{"type": "ping"}]

    def answer(self, choices: Sequence[Choice]) -> Payload:
        """Return the message that the events of a stream add up to."""
        [choice] = choices
        blocks: list[Payload] = []
        events = self.piece(choice, Step(), joined(choice.events))
        for payload in [*events, *self.end(choice)]:
            if payload["type"] == "content_block_start":
                blocks.append(payload["content_block"])
            elif payload["type"] == "content_block_delta":
                _, (name, text) = payload["delta"].items()
                blocks[-1][name] = blocks[-1].get(name, "") + text
        for block in blocks:
            if arguments := block.pop("partial_json", ""):
                block["input"] = json.loads(arguments)
        return {**self._message(blocks, choice), **_end(choice)}

    def start(self, choice: Choice) -> list[Payload]:
        return [{"type": "message_start", "message": self._message([], choice)}]

    def end(self, choice: Choice) -> list[Payload]:
        return [
            *(self._begin(dict(EMPTY_TEXT), "content") if self._block < 0 else []),
            *self._close(),
            {"type": "message_delta", "delta": _end(choice), "usage": self._usage(choice)},
            {"type": "message_stop"},
        ]

    def event(self, event: Event) -> list[Payload]:
        if isinstance(event, Call):
            block: Payload = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            return self._begin({**block, "caller": {"type": "direct"}}, event.index)
        if isinstance(event, Arguments):
            return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        block, name = dict(BLOCKS[event.kind]), BLOCKS[event.kind]["type"]
        begun = [] if self._open == event.kind else self._begin(block, event.kind)
        return [*begun, self._delta({"type": f"{name}_delta", name: event.text})]

    def _begin(self, block: Payload, kind: object) -> list[Payload]:
        closed = self._close()
        self._block, self._open = self._block + 1, kind
        begun = {"type": "content_block_start", "index": self._block, "content_block": block}
        return [*closed, begun]

    def _close(self) -> list[Payload]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._block}]

    def _delta(self, delta: Payload) -> Payload:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _message(self, content: list[Payload], choice: Choice) -> Payload:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.parser.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": self._usage(choice),
        }

    def _usage(self, choice: Choice) -> Payload:
        """Return the numbers of tokens. Unlike OpenAI, Anthropic does not count cached input."""
        cached = self.cached_tokens([choice])
        return {
            "input_tokens": self.request.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": choice.tokens,
            "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens},
            **UNUSED_COUNTS,
        }


def _end(choice: Choice) -> Payload:
    reason = STOP_REASONS.get(choice.finish_reason or "length", "max_tokens")
    if reason == "end_turn" and choice.reader.count:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": choice.stop or None}


ERROR, PATH = MessagesWriter.error, "/v1/messages"
COUNT, SUMMARY = f"{PATH}/count_tokens", "Answers Anthropic's clients"
ENDPOINTS = (
    Endpoint(PATH, MessagesWriter, MessageAnswer, SUMMARY, MessagesRequest, error=ERROR),
    Endpoint(COUNT, count_tokens, CountAnswer, "Counts tokens", CountRequest, error=ERROR),
)
