"""Anthropic's Messages API."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter
from pydantic import AliasChoices, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ..results import Step
from ..text.messages import Message, text_of
from .answers import Choice, Payload, Writer
from .events import Arguments, Call, Event, joined
from .fields import MESSAGES, Body, Boolean, ByType, Fields, Object, Several, String, worded
from .internal import (
    LONGEST_TOOL_NAME,
    TOOLS,
    Chat,
    Function,
    MaxTokens,
    Parameters,
    Sampled,
    Stops,
    ToolChoice,
    Tools,
    Wanted,
)
from .problems import Problem
from .requests import LoadedModel, Prepared
from .service import complete, compute
from .shared_bodies import (
    BasePart,
    Content,
    Other,
    RefusalPart,
    Role,
    SchemaFormat,
    TextPart,
    ThinkingPart,
    Thoughtful,
    Turn,
    parts_of,
)

CHOICES: Mapping[str, ToolChoice] = {
    "auto": ToolChoice(),
    "any": ToolChoice("required"),
    "none": ToolChoice("none"),
}
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
router = APIRouter()


# Bodies.
def _lines(*lines: str | None) -> Message:
    """Return a part of text from lines."""
    return {"type": "text", "text": "\n".join(filter(None, lines)) + "\n"}


class Source(Fields):
    """The source of a document. Only types with a text are read."""

    type: String
    data: String | None = None
    content: Content | None = None

    def text(self) -> str | None:
        """Return the text, or None if there is none."""
        if self.type == "text":
            return self.data
        return None if self.content is None else text_of(parts_of(self.content))


class Document(BasePart):
    type: Literal["document"]
    title: String | None = None
    context: String | None = None
    source: Source

    def part(self) -> Message:
        """Return the text of the document as a part."""
        text = self.source.text()
        return {"type": self.type} if text is None else _lines(self.title, self.context, text)


class SearchResult(BasePart):
    type: Literal["search_result"]
    source: String
    title: String
    content: Content

    def part(self) -> Message:
        """Return the text of the result as a part."""
        return _lines(self.title, self.source, text_of(parts_of(self.content)))


ResultPart = Annotated[
    TextPart | RefusalPart | ThinkingPart | Document | SearchResult | Other,
    ByType("a part of the result with a type, such as text"),
]


class ToolUse(Fields):
    type: Literal["tool_use"]
    id: String | None = None
    name: String
    input: Object | None = None

    def add(self, turn: Turn) -> None:
        """Add the call to a turn."""
        function = {"name": self.name, "arguments": self.input}
        turn.calls.append({"id": self.id, "function": function})


class ToolResult(Fields):
    type: Literal["tool_result"]
    tool_use_id: String | None = None
    content: String | Several[ResultPart] = ""

    def add(self, turn: Turn) -> None:
        """Add the result to a turn."""
        content = parts_of(self.content)
        id = {} if self.tool_use_id is None else {"tool_call_id": self.tool_use_id}
        turn.results.append({"role": "tool", "content": content, **id})


Block = Annotated[
    TextPart | RefusalPart | ThinkingPart | Document | SearchResult | ToolUse | ToolResult | Other,
    ByType("a block with a type, such as text"),
]


class BlocksMessage(Fields):
    role: Role
    content: String | Several[Block]

    def messages(self) -> list[Message]:
        """Return the message as `text.messages` reads it. Results of tools come first, each as a
        message."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        turn = Turn()
        for block in self.content:
            block.add(turn)
        if turn.results and not (turn.parts or turn.calls):
            return turn.results
        calls = {"tool_calls": turn.calls} if turn.calls else {}
        return [*turn.results, {"role": self.role, "content": turn.parts or "", **calls}]


class CustomTool(Function):
    model_config = ConfigDict(extra="ignore")
    type: Literal["custom"] | None = None
    parameters: Parameters | None = Field(None, validation_alias="input_schema")

    def functions(self) -> list[Function]:
        """Return the functions that the model may call."""
        return [self]


class ServersTool(Fields):
    """A tool that runs on Anthropic's servers, such as web_search_20250305."""

    type: String = Field(pattern="_[0-9]{8}$")

    def functions(self) -> list[Function]:
        """Return no function, since the tool runs elsewhere."""
        return []


class MessagesChoice(Fields):
    type: Literal["auto", "any", "none", "tool"]
    name: String = ""
    disable_parallel_tool_use: Boolean = False

    def choice(self) -> ToolChoice:
        """Return the choice."""
        return CHOICES.get(self.type, ToolChoice("required", self.name))


class CountRequest(Body, Thoughtful):
    """The body of /v1/messages/count_tokens."""

    system: Content | None = None
    messages: Annotated[Several[BlocksMessage], Field(min_length=1, max_length=MESSAGES)]
    tools: Annotated[
        Several[
            Annotated[
                CustomTool | ServersTool,
                worded(
                    'a tool such as {"name": ..., "input_schema": ...} with a name of at most '
                    f"{LONGEST_TOOL_NAME} letters, digits, underscores, dots and dashes"
                ),
            ]
        ],
        Field(max_length=TOOLS),
    ] = []  # noqa: RUF012
    tool_choice: Annotated[
        MessagesChoice,
        worded('of the type "auto", "any", "none", or "tool" with a name', inside=True),
    ] = MessagesChoice(type="auto")

    def chat(self) -> Chat:
        """Return the conversation. A last message of the assistant is the beginning of the answer.
        Raises Problem."""
        messages = [part for message in self.messages for part in message.messages()]
        if self.system is not None:
            messages = [{"role": "system", "content": parts_of(self.system)}, *messages]
        last = messages[-1]
        said = last["role"] == "assistant" and text_of(last["content"])
        functions = [function for tool in self.tools for function in tool.functions()]
        parallel = not self.tool_choice.disable_parallel_tool_use
        return Chat(
            messages,
            Tools.of(functions, self.tool_choice.choice(), parallel),
            self.variables(),
            self.thinking_budget(),
            "continue" if said and not last.get("tool_calls") else "answer",
        )


class OutputConfig(Fields):
    """The field `effort` is only a hint."""

    format: SchemaFormat | None = None


class MessagesRequest(CountRequest, Sampled):
    """The body of /v1/messages."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {"container": (), "mcp_servers": ([],)}
    max_tokens: MaxTokens
    stop: Stops | None = Field(None, validation_alias=AliasChoices("stop_sequences", "stop"))
    stream: Boolean | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: SchemaFormat | None = None


def count_tokens(model: LoadedModel, body: CountRequest) -> Payload:
    """Count the tokens of a prompt. Raises Problem."""
    return {"input_tokens": len(model.chat_ids(body.chat()))}


def prepared_messages(model: LoadedModel, body: MessagesRequest) -> Prepared:
    """Prepare a message. Raises Problem and SpecdecError."""
    form = body.output_config.format or body.output_format
    constraint = None if form is None else form.constraint("output_config")
    return model.chat(body.chat(), Wanted(body, constraint))


# Answers.
class MessagesWriter(Writer):
    """The wire format of messages, which have one choice."""

    named = True
    _block = -1
    _open: object = None

    def failed(self, problem: Problem) -> list[Payload]:
        return [error(problem)[1]]

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
            "model": self.model,
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
            "input_tokens": self.prepared.prompt_tokens - cached,
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


def error(problem: Problem) -> tuple[int, Payload]:
    """Return the status and the payload of an error."""
    kind = ANTHROPIC_ERRORS.get(problem.status, problem.type)
    return problem.status, {"type": "error", "error": {"type": kind, "message": problem.message}}


# Routes.
@router.post("/messages", summary="Answers Anthropic's clients")
async def messages(body: MessagesRequest, http: Request) -> Response:
    """Answer the messages of a conversation."""
    return await complete(
        http,
        body,
        lambda model, body: MessagesWriter(
            model.name, prepared_messages(model, body), stream=body.stream
        ),
    )


@router.post("/messages/count_tokens", summary="Counts the tokens of a prompt")
async def count(body: CountRequest, http: Request) -> Response:
    """Count the tokens of a prompt."""
    return await compute(http, body, count_tokens)
